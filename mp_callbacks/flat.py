class FlatStep:
    def __init__(self,opt): raise NotImplementedError
