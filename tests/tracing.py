"Ctrl-C at any line of some code"
import linecache,sys

def interrupted(f, n, *where):
    """Call `f`, with Ctrl-C before the `n`th line that it runs of files or functions named `where`; has it so many?

    A real one comes at a call, so lines with `try:` or `finally:` alone don't count, nor do those with `with`, to which
    Python comes back at the end."""
    left = [n]
    def trace(frame, event, arg):
        code = frame.f_code
        if not code.co_filename.endswith(where) and code.co_name not in where: return
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event=='line' and not line.startswith(('try:','finally:','with ')):
            left[0] -= 1
            if not left[0]: raise KeyboardInterrupt
        return trace
    before = sys.gettrace() # such as that of coverage
    sys.settrace(trace)
    try: f()
    except KeyboardInterrupt: return True
    finally: sys.settrace(before)
