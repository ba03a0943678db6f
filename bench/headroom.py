"""How much `headroom` a loss scale needs at its start: the steps that it skips, in float16 on a CPU

Each small model trains with AdamW on random batches, as `to_native_fp16` and `to_fp16` compute. The loss scale starts
at 2**10 and is measured in the first finite step; `None` is a scale without headroom, from 2**24. On a CPU, `to_fp16`
leaves layer norms in float32. Prints a Markdown table. Needs timm and transformers."""
import argparse

import timm,torch,transformers

from common import command,machine
from models import GPT,ViT,conv,loss_func,mlp
from mp_callbacks.core.grads import prepare_grads
from mp_callbacks.core.half import half_precision
from mp_callbacks.core.loss_scale import DynamicLossScale

def hf(kind, head, **config):
    "A small `transformers` model with random weights"
    sizes = dict(vocab_size=1000, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
                 max_position_embeddings=64, bos_token_id=None, eos_token_id=None)
    return getattr(transformers, kind+head)(getattr(transformers, f'{kind}Config')(**sizes | config))

def gpt2(): return hf('GPT2', 'LMHeadModel', n_embd=64, n_layer=3, n_head=4, n_positions=64)
def t5(): return hf('T5', 'ForConditionalGeneration', d_model=64, d_ff=256, d_kv=16, num_layers=3, num_heads=4)
def vit(): return timm.models.VisionTransformer(16, 4, num_classes=10, embed_dim=64, depth=3, num_heads=4)
def swin():
    sizes = dict(embed_dim=32, depths=(2,2), num_heads=(2,4), window_size=2)
    return timm.models.SwinTransformer(16, 2, num_classes=10, **sizes)

def bert(): return hf('Bert', 'ForSequenceClassification', hidden_size=128, num_hidden_layers=4, intermediate_size=512)
def llama(): return hf('Llama', 'ForCausalLM')

words,image = 32,(3,16,16)
# name: model, shape of an input, number of classes or words
models = dict(
    mlp   = (lambda: mlp(256, 6, 10),                    (256,), 10),
    conv  = (lambda: conv(8, 3, 10),                     image,  10),
    vit   = (lambda: ViT(16, 4, 64, 256, 4, 3, 10),      image,  10),
    gpt   = (lambda: GPT(1000, words, 64, 256, 4, 3),    words,  1000),
    bert  = (bert,                                       words,  2),
    gpt2  = (gpt2,                                       words,  1000),
    llama = (llama,                                      words,  1000),
    t5    = (t5,                                         words,  1000),
    timm_vit  = (vit,                                    image,  10),
    timm_swin = (swin,                                   image,  10))

def call(model, x):
    if isinstance(model, transformers.T5ForConditionalGeneration): return model(input_ids=x, decoder_input_ids=x).logits
    return model(x).logits if isinstance(model, transformers.PreTrainedModel) else model(x)

def target(x, n_out):
    """Something to learn

    The word plus one, the half of the vocabulary that the first word is in, or the largest of the first numbers."""
    if x.is_floating_point(): return x.flatten(1)[:,:n_out].argmax(1)
    return (x+1)%n_out if n_out==1000 else x[:,0]*n_out//1000

def train(name, rules, scale, seed, steps, batch, lr):
    "Were the gradients finite? One bool for each step."
    make,shape,n_out = models[name]
    torch.manual_seed(seed)
    model = make().train()
    half = half_precision(model, torch.float16, rules=rules)
    opt,log = torch.optim.AdamW(model.parameters(), lr),[]
    for _ in range(steps):
        x = torch.randint(1000, (batch,shape)) if shape==words else torch.randn(batch, *shape)
        y = target(x, n_out)
        with half: scale.scale(loss_func(call(model, x), y)).backward()
        stats = prepare_grads(model.parameters(), scale.loss_scale, amax=scale.wants_amax)
        if stats.finite: opt.step()
        opt.zero_grad()
        log.append(stats.finite)
        scale = scale.adjust(stats.finite, stats.amax)
    return log

def start(headroom):
    return DynamicLossScale(2.**24) if headroom is None else DynamicLossScale(2.**10, headroom=headroom)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--models', nargs='+', default=list(models), choices=models)
    p.add_argument('--headrooms', nargs='+', type=float, default=[2.,4.,6.,8.])
    p.add_argument('--seeds', type=int, default=3)
    p.add_argument('--steps', type=int, default=20)
    p.add_argument('--batch', type=int, default=64)
    p.add_argument('--lr', type=float, default=1e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    rooms = [*args.headrooms,None]
    print(f'`{command()}`: {machine()}, timm {timm.__version__}, transformers {transformers.__version__}.\n')
    print(f'Steps skipped, of {args.seeds*args.steps} ({args.seeds} seeds, {args.steps} steps each), by `headroom`:\n')
    print('| model | computes with | '+' | '.join('`None`' if o is None else f'{o:g}' for o in rooms)+' |')
    print('|---'*(len(rooms)+2)+'|')
    for name in args.models:
        for rules in (False,True):
            def _logs(o):
                return [train(name, rules, start(o), i, args.steps, args.batch, args.lr) for i in range(args.seeds)]
            logs = {o:_logs(o) for o in rooms}
            skipped = [str(sum(not ok for log in logs[o] for ok in log)) for o in rooms]
            print(f"| {name} | {'`to_fp16`' if rules else '`to_native_fp16`'} | {' | '.join(skipped)} |", flush=True)

if __name__=='__main__': main()
