"""A BERT with dropout in transformers' Trainer, in our half precision: where did nan begin?

The second look at a batch has to draw the dropout masks of the first, or it may miss what went wrong. Prints what the
doctor finds in a head that bfloat16 breaks; a float32 head trains. First `pip install transformers accelerate`."""
import torch,torch.nn.functional as F
from torch import nn
from transformers import BertConfig,BertModel,Trainer,TrainerCallback,TrainingArguments
from transformers.trainer_callback import PrinterCallback
from mp_callbacks.core.half import half_precision
from mp_callbacks.core.training_steps import TrainingSteps

def seeded_loss(model, inputs, seed): # of a batch that is computed again, with the same dropout
    torch.manual_seed(seed)
    return model(**inputs)['loss']

class HalfTrainer(Trainer, TrainerCallback): # ends training at the first gradients that aren't finite
    steps = half = None
    def training_step(self, model, inputs, *args, **kwargs):
        if self.steps is None:
            self.steps = TrainingSteps(model, self.optimizer.optimizer, self.half,
                                       compute_loss=seeded_loss, max_skips=1)
            self.accelerator.backward = self.steps.backward
            self.add_callback(self)
        seed = int(torch.randint(2**31, ()))
        torch.manual_seed(seed)
        with self.steps.batch(inputs, seed): return super().training_step(model, inputs, *args, **kwargs)
    def on_pre_optimizer_step(self, *args, **kwargs): self.steps.make() # the Trainer's own finds no gradients then

class YesNo(nn.Linear): # log probabilities; bfloat16 rounds `p` to 1, and then `1-p` is 0
    def forward(self, x):
        p = super().forward(x).sigmoid()
        return (1-p).log(),p.log()

class Words(nn.Module): # is each word in the text?
    def __init__(self):
        super().__init__()
        cfg = BertConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=64, hidden_dropout_prob=.5)
        self.bert,self.head = BertModel(cfg),YesNo(32,20)
    def forward(self, input_ids, labels):
        no,yes = self.head(self.bert(input_ids).pooler_output)
        return dict(loss=-torch.where(labels>0, yes, no).mean(), logits=yes)

def train(**kwargs):
    torch.manual_seed(0)
    texts = torch.randint(20, (512,6))
    texts[:,0] = 0 # as [CLS]: this word is in every text, so its `p` comes near 1
    data = [dict(input_ids=o, labels=F.one_hot(o, 20).amax(0)) for o in texts]
    args = TrainingArguments('runs', use_cpu=True, learning_rate=1e-2, per_device_train_batch_size=8,
                             save_strategy='no', report_to=[], disable_tqdm=True, logging_strategy='no')
    model = Words()
    trainer = HalfTrainer(model, args, train_dataset=data)
    trainer.half = half_precision(model, torch.bfloat16, **kwargs)
    trainer.remove_callback(PrinterCallback)
    return trainer.train()

try: train()
except FloatingPointError as e: print(e)
print(f"loss with keep='head': {train(keep='head').training_loss:.2f}")
