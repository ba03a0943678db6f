"The table in nbs/explanations/presets.ipynb is saved in the notebook: here, that it has the numbers of the package"
import json,re
from pathlib import Path

import torch
from mp_callbacks.loss_scale import DynamicLossScale,loss_scale_presets

page = Path(__file__).resolve().parent.parent/'nbs/explanations/presets.ipynb'
f32 = torch.finfo(torch.float32)

def rows():
    "The cells of each row of the saved table"
    outputs = [o for c in json.loads(page.read_text(encoding='utf-8'))['cells'] for o in c.get('outputs', [])]
    table = next(o['data']['text/markdown'] for o in outputs if 'text/markdown' in o.get('data', {}))
    return [[o.strip() for o in line.strip('| \n').split(' | ')] for line in ''.join(table).splitlines()[2:]]

def number(s, dash=None):
    "The number that `s` shows, such as `2<sup>16</sup>`"
    if s=='–': return dash
    base,_,power = s.removesuffix('</sup>').partition('<sup>')
    return float(base)**int(power or 1)

def test_table_of_presets():
    found = {}
    for name,start,factors,period,bounds,*_ in rows():
        (growth,backoff),(low,high) = factors.split(' / '),bounds.split(' / ')
        first = [number(o) for o in (start,growth,backoff,period)]
        found[re.match('`(.*?)`', name)[1]] = [*first,number(low, f32.tiny),number(high, f32.max)]
    def numbers(s):
        backoff = 1/s.factor if s.backoff is None else s.backoff
        return [s.loss_scale, s.factor, backoff, s.period, s.min_loss_scale, s.max_loss_scale]
    assert found=={o:numbers(DynamicLossScale.preset(o)) for o in loss_scale_presets}

def test_other_rules_of_presets():
    "`at_max='keep'` isn't shown without a cap"
    names = 'consecutive','growth_delay','hysteresis','refill','at_min','at_max','headroom'
    for name,*_,rules in rows():
        s = DynamicLossScale.preset(re.match('`(.*?)`', name)[1])
        expected = [f'{o}={getattr(s, o)!r}' for o in names if getattr(s, o)!=getattr(DynamicLossScale(), o)]
        if s.max_loss_scale==f32.max: expected = [o for o in expected if not o.startswith('at_max')]
        assert re.findall('`(.*?)`', rules)==expected
