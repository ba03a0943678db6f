"""A BERT with dropout in transformers' Trainer: where did nan begin?

The second look at a batch has to draw the dropout masks of the first, or it may miss what went wrong. Prints what the
doctor finds in a head that bfloat16 breaks; a float32 head trains. First `pip install transformers accelerate`."""
import torch,torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import get_device_states,set_device_states
from transformers import BertConfig,BertModel,Trainer,TrainingArguments
from transformers.trainer_callback import PrinterCallback
from mp_callbacks.grads import prepare_grads
from mp_callbacks.half import half_precision
from mp_callbacks.nonfinite import diagnose

class WatchedTrainer(Trainer): # ends training at the first gradients that aren't finite
    def training_step(self, model, inputs, *args, **kwargs):
        cpu,(devices,states) = torch.get_rng_state(),get_device_states(*model.parameters())
        loss = super().training_step(model, inputs, *args, **kwargs)
        if prepare_grads(model.parameters()).finite: return loss
        model = self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        def compute_loss():
            torch.set_rng_state(cpu) # the same dropout
            set_device_states(devices, states) # on GPUs, too
            return model(**inputs)['loss']
        half = half_precision(model, torch.bfloat16, rules=False)
        raise FloatingPointError(diagnose(model, compute_loss, half))

class YesNo(nn.Linear): # log probabilities; bfloat16 rounds `p` to 1, and then `1-p` is 0
    def forward(self, x):
        p = super().forward(x).sigmoid()
        return (1-p).log(),p.log()

class YesNo32(YesNo):
    @torch.autocast('cpu', enabled=False) # computes in float32
    def forward(self, x): return super().forward(x.float())

class Words(nn.Module): # is each word in the text?
    def __init__(self, head):
        super().__init__()
        cfg = BertConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=64, hidden_dropout_prob=.5)
        self.bert,self.head = BertModel(cfg),head(32,20)
    def forward(self, input_ids, labels):
        no,yes = self.head(self.bert(input_ids).pooler_output)
        return dict(loss=-torch.where(labels>0, yes, no).mean(), logits=yes)

def train(head):
    torch.manual_seed(0)
    texts = torch.randint(20, (512,6))
    texts[:,0] = 0 # as [CLS]: this word is in every text, so its `p` comes near 1
    data = [dict(input_ids=o, labels=F.one_hot(o, 20).amax(0)) for o in texts]
    args = TrainingArguments('runs', bf16=True, use_cpu=True, learning_rate=1e-2, per_device_train_batch_size=8,
                             save_strategy='no', report_to=[], disable_tqdm=True, logging_strategy='no')
    trainer = WatchedTrainer(Words(head), args, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    return trainer.train()

try: train(YesNo)
except FloatingPointError as e: print(e)
print(f'loss with YesNo32: {train(YesNo32).training_loss:.2f}')
