"""Do notebooks and fast tests notice small changes of the code? Edits of modules, chosen by a seed, one at a time

    python bench/mutations.py --n 300 --seed 1 --notebooks
    python bench/mutations.py --n 10 --seed 1 --of ModelToHalf calls

A mutant is one edit of the syntax tree: a condition is negated, a statement dropped, a constant changed, a comparison
exchanged (`<` for `<=`), or `and` for `or`. Each is tried in a copy of the repository, with three runners: the cells of
the module's own notebook, those of the other notebooks, and the fast tests that run its line, then those that run its
function, or nothing of the core in their own process, the shortest first, up to the first that fails. It is found if
one fails, or doesn't end in time. What the first runner finds the next ones aren't asked for, but with `--notebooks`,
which says what each of them finds. Which test runs which line is measured first, by pytest-cov.
Each is a row of the csv as soon as it was tried, so a second run goes on; remove the csv after a change of the code.
What survives and changes nothing that anybody could see stands in mutations_same.csv, with the reason."""
import argparse,ast,csv,json,os,random,re,signal,subprocess,sys
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate,chain
from pathlib import Path
from queue import Queue
from shutil import copy
from tempfile import TemporaryDirectory
from threading import Timer
from time import perf_counter
from typing import NamedTuple

import pandas as pd

from common import command,machine,markdown

root = Path(__file__).resolve().parent.parent
core = '''loss_scale grads modules processes restore returned forwards own cast ways switch chosen_ways half error_notes
    backward pending_step training_state skips misuse measure checked_steps training_steps'''.split()
modules = {o:f'mp_callbacks/core/{o}.py' for o in core}
modules |= {o:f'mp_callbacks/learner/{o}.py' for o in ('precision','callback','calls','recorder')}
runners = 'notebook','notebooks','pytest' # the module's own, all others, and tests/

class Mutant(NamedTuple):
    "An edit of a module"
    module:str # Name
    line:int # Where it is, from 1
    kind:str # What was done
    old:str # The code
    new:str # What stands in its place
    around:range # The lines of the body of its function, if it is in one
    start:int # Where `old` begins in the source
    def apply(self, source): return source[:self.start]+self.new+source[self.start+len(self.old):]

exchanged = {ast.Lt:ast.LtE, ast.LtE:ast.Lt, ast.Gt:ast.GtE, ast.GtE:ast.Gt, ast.Eq:ast.NotEq, ast.NotEq:ast.Eq,
             ast.Is:ast.IsNot, ast.IsNot:ast.Is, ast.In:ast.NotIn, ast.NotIn:ast.In, ast.And:ast.Or, ast.Or:ast.And}

def within(name):
    "The modules and lines of the module or the class `name`"
    if name in modules: return {name:range(1, 10**6)}
    for k,file in modules.items():
        for o in ast.parse((root/file).read_text(encoding='utf-8')).body:
            if isinstance(o, ast.ClassDef) and o.name==name: return {k:range(o.lineno, o.end_lineno+1)}
    raise ValueError(f'{name!r} is neither a module nor a class of one. Modules: {", ".join(modules)}.')

def other_constant(o):
    "Another constant of the kind of `o`, or None"
    if isinstance(o, bool): return not o
    return o+1 if isinstance(o, int) else 2*o+1 if isinstance(o, float) else None

def edited(node):
    "Pairs of a kind of edit, and what stands in the place of `node`, as text, and of which node"
    if isinstance(node, (ast.If,ast.IfExp,ast.While)): yield 'negated',node.test,f'not ({ast.unparse(node.test)})'
    if isinstance(node, ast.comprehension):
        for o in node.ifs: yield 'negated',o,f'not ({ast.unparse(o)})'
    if isinstance(node, ast.Compare) and len(node.ops)==1:
        new = ast.Compare(node.left, [exchanged[type(node.ops[0])]()], node.comparators)
        yield 'comparison',node,f'({ast.unparse(new)})'
    if isinstance(node, ast.BoolOp):
        yield 'and/or',node,f'({ast.unparse(ast.BoolOp(exchanged[type(node.op)](), node.values))})'
    if isinstance(node, ast.Constant) and (new := other_constant(node.value)) is not None:
        yield 'constant',node,repr(new)
    calls = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    targets = node.targets if isinstance(node, ast.Assign) else ()
    names = all(isinstance(e, ast.Name) for o in targets for e in getattr(o, 'elts', [o])) # to drop them is a NameError
    if calls or isinstance(node, (ast.AugAssign,ast.Raise,ast.Delete)) or isinstance(node, ast.Assign) and not names:
        yield 'dropped',node,'pass'
    if isinstance(node, ast.Return) and getattr(node.value, 'value', node) is not None: yield 'dropped',node,'return'

def mutants(module, source):
    "All edits of the functions in `source`: not of annotations, nor of texts"
    tree,lines = ast.parse(source),source.splitlines(keepends=True)
    was,starts = ast.dump(tree),[0,*accumulate(map(len, lines))]
    def at(line, col): return starts[line-1]+len(lines[line-1].encode()[:col].decode())
    left_out = {id(o) for n in ast.walk(tree) for a in (getattr(n, 'annotation', None),getattr(n, 'returns', None),
                *([n] if isinstance(n, (ast.JoinedStr,ast.ImportFrom)) else [])) if a is not None for o in ast.walk(a)}
    res,around = {},{}
    for node in ast.walk(tree): # from the outside to the inside
        for o in ast.iter_child_nodes(node):
            if isinstance(o, ast.FunctionDef): around[o] = range(o.body[0].lineno, o.end_lineno+1)
            else: around[o] = around.get(node, ())
        if id(node) in left_out: continue
        for kind,where,new in edited(node):
            start,end = at(where.lineno, where.col_offset),at(where.end_lineno, where.end_col_offset)
            o = Mutant(module, where.lineno, kind, source[start:end], new, around[where], start)
            with suppress(SyntaxError):
                if ast.dump(ast.parse(o.apply(source)))!=was: res[o] = None
    return sorted(res, key=lambda o: (o.start,o.kind,o.new))

# A process that has imported the libraries, and forks for each mutant: to import them takes longer than most tests
worker = """
import json,os,sys,faulthandler
sys.path[:0] = sys.argv[1:]
import pytest,torch,hypothesis,torch._dynamo,fastai.vision.all,fastai.text.all,fastai.tabular.all
torch.set_num_threads(1)
class Chosen:
    def __init__(self, names): self.at = {o:i for i,o in enumerate(names)}
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted([o for o in items if o.nodeid in self.at], key=lambda o: self.at[o.nodeid])
for line in sys.stdin:
    out,args,names = json.loads(line)
    files = sorted({o.partition('::')[0] for o in names}) # pytest takes long to look for each by its name
    pid = os.fork()
    if not pid:
        os.setsid()
        os.dup2(fd := os.open(out, os.O_WRONLY|os.O_CREAT|os.O_TRUNC), 1)
        os.dup2(fd, 2)
        os._exit(pytest.main([*args, *files], [Chosen(names)]))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

def files():
    "Names of the files of the repository; Git lists those that were removed, too"
    names = subprocess.run('git ls-files -co --exclude-standard'.split(), cwd=root, text=True, capture_output=True)
    return [o for o in names.stdout.splitlines() if (root/o).is_file()]

class Copy:
    "A copy of the repository at `path`, and a process that tests it"
    def __init__(self, path):
        self.path,self.out = path,path/'out.txt'
        for o in files():
            (path/o).parent.mkdir(parents=True, exist_ok=True)
            copy(root/o, path/o)
        cmd = [sys.executable, '-c', worker, str(path), str(path/'tests')]
        # bytecode of an edit is as old as it
        self.env = env = dict(os.environ, PYTHONPATH=str(path), PYTHONDONTWRITEBYTECODE='1')
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(cmd, text=True, cwd=path, env=env, preexec_fn=lambda: os.nice(19), **pipes)

    def failed(self, tests, limit):
        "The first of `tests` that fails, 'no end' if it takes more than `limit` seconds, or '' if it passes"
        if not tests: return ''
        args = '-x -q -rfE --tb=no -p no:cacheprovider -p no:xdist --flags cells'.split()
        print(json.dumps([str(self.out), args, tests]), file=self.process.stdin, flush=True)
        pid,late = int(self.process.stdout.readline()),[]
        def end():
            late.append(1)
            os.killpg(pid, signal.SIGKILL)
        timer = Timer(limit, end)
        timer.start()
        status = int(self.process.stdout.readline())
        timer.cancel()
        with suppress(ProcessLookupError): os.killpg(pid, signal.SIGKILL) # what tests have started
        if late: return 'no end'
        failure = r'^(?:FAILED|ERROR) (tests/.+?)(?: - |$)'
        found = re.search(failure, self.out.read_text(errors='replace'), re.M)
        return '' if status==0 else found[1] if found else f'exit code {status}'

    def tried(self, o, tests, limit, every):
        "Which of `tests`, a list for each runner, fails with the mutant `o`: of `every` runner, or up to the first"
        file,res = self.path/modules[o.module],dict.fromkeys(runners, '')
        source = file.read_text(encoding='utf-8')
        file.write_text(o.apply(source), encoding='utf-8')
        try:
            for k,names in tests.items():
                res[k] = self.failed(names[:40], limit) or self.failed(names[40:], limit) # to collect all takes long
                if res[k] and not every: break
        finally: file.write_text(source, encoding='utf-8')
        return res

class Tests:
    "The fast tests that pass in the `Copy` `place`: how long each takes, and which lines of the `modules` it runs"
    def __init__(self, place, tmp):
        data,xml = Path(tmp)/'coverage',Path(tmp)/'junit.xml'
        args = '-q -n 2 --dist loadfile -p no:cacheprovider --cov=mp_callbacks --cov-context=test --cov-report='
        cmd = [sys.executable, '-m', 'pytest', *args.split(), '--flags', 'cells', f'--junitxml={xml}']
        from coverage import CoverageData # comes with pytest-cov, which nothing else here needs
        subprocess.run(cmd, cwd=place.path, env=dict(place.env, COVERAGE_FILE=str(data)))
        def name(o): return f"{o.get('classname').replace('.', '/')}.py::{o.get('name')}"
        self.seconds = {name(o):float(o.get('time')) for o in ET.parse(xml).iter('testcase') if not len(o)}
        coverage = CoverageData(str(data))
        coverage.read()
        self.lines = {k:self._by_line(coverage, str(place.path/file)) for k,file in modules.items()}
        self.every = {k:{*chain.from_iterable(lines.values())} for k,lines in self.lines.items()}
        self.size = Counter(t for lines in self.lines.values() for tests in lines.values() for t in tests)
        self.seen = {*self.size}
        self.cells = {o for o in self.seconds if o.startswith('tests/test_modules.py')} # a test for each notebook

    def _by_line(self, coverage, path):
        found = coverage.contexts_by_lineno(path).items()
        return {line:{o.rpartition('|')[0] for o in contexts} for line,contexts in found} # '' is the import

    def of(self, o):
        "The tests for the mutant `o`, a list for each runner"
        lines = self.lines[o.module]
        run = lines.get(o.line, ())
        # tests of interrupts at each line are not seen there; and what runs in the import counts for all
        near = set().union(*[lines.get(i, ()) for i in (o.line,*o.around)])
        if '' in near or not near: near = self.every[o.module]
        ours = [t for t in self.seconds if t not in self.cells and (t in near or t not in self.seen)]
        own,others = [],[]
        for t in self.cells: (own if modules[o.module].endswith(f"{t.partition('[')[2][:-1]}.py") else others).append(t)
        ours.sort(key=lambda t: (t not in run, t not in near, self.size[t]*self.seconds[t]))
        return dict(zip(runners, (own, sorted(others, key=self.seconds.get), ours)))

columns = [*'module line kind old new'.split(),*runners,'seconds']

def read(path, columns):
    if not path.exists(): return pd.DataFrame(columns=columns)
    return pd.read_csv(path, comment='#', keep_default_na=False)

class Mutations:
    "The csv at `path`, and what tries mutants in `jobs` copies in the folder `tmp`, with `every` runner"
    def __init__(self, path, jobs, limit, every, tmp):
        self.path,self.limit,self.every,self.jobs,self.copies,self.passes = path,limit,every,jobs,Queue(),set()
        copies = [Copy(Path(tmp)/str(i)) for i in range(jobs)]
        self.tests = Tests(copies[0], tmp)
        for o in copies: self.copies.put(o)

    def add(self, *row):
        with self.path.open('a', newline='', encoding='utf-8') as f: csv.writer(f).writerow(row)

    def run(self, o):
        "Try the mutant `o`: a test that fails has to pass without it"
        copy,begun = self.copies.get(),perf_counter()
        try:
            found = copy.tried(o, self.tests.of(o), self.limit, self.every)
            seconds = perf_counter()-begun
            for t in {*found.values()}-self.passes:
                if '::' not in t: continue # it ends the process, or can't be imported
                if copy.failed([t], self.limit): raise RuntimeError(f'{t} fails without an edit')
                self.passes.add(t)
            by = [t.removeprefix('tests/test_') for t in found.values()]
            self.add(*o[:5], *by, f'{seconds:.0f}')
            by = [*filter(None, by)] or ['SURVIVED']
            print(f'{o.module}:{o.line} {o.kind}: {o.old!r} -> {o.new!r}:', *by, flush=True)
        finally: self.copies.put(copy)

    def run_all(self, mutants, possible):
        new,about = not self.path.exists(),f'{len(mutants)} of {possible} possible edits'
        with self.path.open('a', encoding='utf-8') as f: f.write(f'# {command()} | {machine()} | {about}\n')
        if new: self.add(*columns)
        with ThreadPoolExecutor(self.jobs) as pool: [*pool.map(self.run, mutants)]
        for _ in range(self.jobs): self.copies.get().process.stdin.close() # which ends it

def report(path):
    "Tables of what is in the csv, as Markdown"
    about = [o[2:] for o in path.read_text(encoding='utf-8').splitlines() if o.startswith('# ')]
    keys = columns[:5]
    df,same = read(path, columns),read(path.with_name('mutations_same.csv'), [*keys,'why'])
    df = df.merge(same, 'left', keys).fillna({'why':''})
    found = df[[*runners]]!=''
    df['own_notebook'],df['notebooks'],df['pytest'] = found.notebook,found.notebook|found.notebooks,found.pytest
    df['together'] = df.notebooks|df.pytest
    df['survived'],df['equivalent'] = ~df.together,~df.together&(df.why!='')
    def counts(by):
        res = df.groupby(by, sort=False)[['survived','equivalent','own_notebook','notebooks','pytest','together']].sum()
        res.insert(0, 'mutants', df.groupby(by, sort=False).size())
        res.loc['all'] = res.sum()
        for k in ('own_notebook','notebooks','pytest','together'):
            res[k] = [f'{100*o:.0f}%' for o in res[k]/(res.mutants-res.equivalent).clip(lower=1)]
        return markdown(res.rename(columns=lambda o: o.replace('_', ' ')))
    left = df[df.survived].copy()
    def code(o): return f'`` {o} ``'.replace('|', '\\|').replace('\n', ' ')
    for o in ('old','new'): left[o] = left[o].map(code)
    text = [f'Each edit is in {path.name}. Shares are of those that are not equivalent: these are in '
            'mutations_same.csv, with the reason. *Own notebook* is that of the module, *notebooks* are all. A runner '
            'that is not asked, as another has found the edit, finds nothing: `--notebooks` asks each.',
            counts('module'), counts('kind'),
            '## What survived', markdown(left.set_index('module')[['line','old','new','why']])]
    path.with_suffix('.md').write_text('\n\n'.join(['# Mutations', '\n'.join(f'- {o}' for o in about), *text]))

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--n', type=int, default=300, help='how many mutants [300]')
    p.add_argument('--seed', type=int, default=1, help='which [1]')
    p.add_argument('--only', nargs='+', choices=modules, default=[*modules], help='of these modules')
    p.add_argument('--of', nargs='+', default=[], help='so many of each of these modules and classes')
    p.add_argument('--notebooks', action='store_true', help='ask each runner, and say what it finds')
    p.add_argument('--jobs', type=int, default=2, help='how many at once [2]')
    p.add_argument('--limit', type=float, default=600, help='end the tests of a mutant after so many seconds [600]')
    p.add_argument('--out', type=Path, default=root/'bench/results', help='folder for the results [bench/results]')
    args = p.parse_args()
    every = [o for k,file in modules.items() for o in mutants(k, (root/file).read_text(encoding='utf-8'))]
    chosen,rng = [],random.Random(args.seed)
    for where in [within(o) for o in args.of] or [{k:range(1, 10**6) for k in args.only}]:
        some = [o for o in every if o.line in where.get(o.module, ())]
        chosen += rng.sample(some, min(args.n, len(some)))
    path = args.out/'mutations.csv'
    known = {*read(path, columns)[columns[:5]].astype(str).itertuples(index=False, name=None)}
    todo = [o for o in chosen if tuple(map(str, o[:5])) not in known]
    if todo:
        with TemporaryDirectory() as tmp:
            Mutations(path, args.jobs, args.limit, args.notebooks, tmp).run_all(todo, len(every))
    if path.exists(): report(path)

if __name__=='__main__': main()
