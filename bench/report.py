"""How long `precision_report` takes, beside training steps with the batches that it looks at, on a CPU

A report runs each batch in half precision and in float32. Steps and reports take turns in one process. Prints a
Markdown table of the CPU time for each batch: medians, and medians of each turn's ratios."""
import argparse
from statistics import median

import pandas as pd,torch

from common import command,machine,markdown
from processes import ProcessClock
from loops import Variant,build
from train import tasks,tiny

def cpu_ms(f):
    clock = ProcessClock('cpu')
    with clock: f()
    return clock.cpu

def measure(task, precision, batches, turns):
    "Medians of a step in half precision, of one in float32, of the report, and of its ratios to both and to float32"
    half,full = [build(Variant('ours', 'fused', o), task.model('cpu')) for o in (precision,'fp32')]
    data,rows = [task.data('cpu')]*batches,[]
    for i in range(turns+1): # the first is to warm up
        h,f = [cpu_ms(lambda: loop(data))/batches for loop in (half,full)] # `half` keeps `data` for the report
        report = cpu_ms(lambda: half.learn.precision_report(batches))/batches
        if i: rows.append((h, f, report, report/(h+f), report/f))
    return map(median, zip(*rows))

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--batches', type=int, default=4, help='batches in a report [4]')
    p.add_argument('--turns', type=int, default=7, help='how many turns each has [7]')
    p.add_argument('--tiny', action='store_true', help='toy sizes, to see that it works: the numbers mean nothing')
    args = p.parse_args()
    torch.set_num_threads(1)
    rows = []
    for task in tiny if args.tiny else tasks:
        for precision in ('bf16','fp16'):
            if precision=='fp16' and 'conv' in task.name: continue # some hundred times slower on a CPU
            rows.append((task.name, precision, *measure(task, precision, args.batches, args.turns)))
    print(f'{command()} | {machine()}\n')
    cols = ['model','precision','half step, ms','float32 step, ms','report, ms','of both','of float32']
    print(markdown(pd.DataFrame(rows, columns=cols).set_index('model')))

if __name__=='__main__': main()
