"""Turn the notebooks in nbs/ into Markdown: `pages` for the site, `readme` for README.md

Nothing is run: the outputs are those saved in the notebooks, and what is documented is looked up in the package. Three
dialects of Markdown are written: GitHub's, plain Markdown, which docstrings link to, and the site's. Zensical does the
rest: the sidebar and the look are in mkdocs.yml, and it checks the links between pages. nbdev finds notebooks, removes
hidden cells, and knows where names are documented; its own pages need Quarto, and its tables of parameters have no
links."""
import argparse,ast,base64,inspect,json,os,re,shutil,sys,yaml
from collections import ChainMap
from dataclasses import is_dataclass
from functools import lru_cache
from html import escape
from importlib import import_module
from itertools import groupby
from pathlib import Path
from textwrap import dedent,indent

from latex2mathml.converter import convert as mathml

from fastcore.docments import docments,docstring
from fastcore.nbio import read_nb
from nbdev.config import get_config,nbpath2html
from nbdev.doclinks import NbdevLookup,nbglob
from nbdev.processors import FilterDefaults,add_links,clean_magics,exec_show_docs

here = Path(__file__).resolve().parent
cfg  = get_config(here)
base = cfg.doc_url.rstrip('/')+'/'
blob = f'{cfg.git_url}/blob/{cfg.branch}/' # the repository's files
vocabularies = {'jmp','mpx','emily','fastai16'} # their names, often ours or plain words, don't become links
# The cell that makes a notebook work in Colab. A page links to Colab if its notebook has it; its badge is for GitHub.
install = f'! [ -e /content ] && pip install -Uqq git+{cfg.git_url}'
badge = '[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]'
sidebar = {k: v if isinstance(v, list) else [v] for part in yaml.safe_load((here/'mkdocs.yml').read_text())['nav']
           for k,v in part.items()}
generated,root_files = 'names.md',['CONTRIBUTING.md','CHANGELOG.md'] # pages that come from no notebook
# modules that hold the package together: no user needs a name of theirs
internals = {*'core.own core.modules core.processes core.restore core.rehearse core.returned core.forwards '
             'core.error_notes core.cast core.blame core.measure learner.fastai_internals learner.explain_skips '
             'learner.opt_state learner.precision demo'.split()}

# --- What the pages are made of, in three dialects of Markdown

class GitHub:
    "Markdown as GitHub reads it, for the page at `page`: links lead to the site"
    show_docs = False
    def __init__(self, page=Path('index')): self.page = page
    def link(self, url):
        p,sep,frag = url.partition('#')
        if not p.endswith('.ipynb') or '://' in p: return url
        return base+os.path.normpath(self.page.parent/nbpath2html(p)).replace(os.sep, '/')+sep+frag
    def symbol(self, name, anchors, source): return f'### {name}' + (f' ([source]({source}))' if source else '')
    def code(self, s, summary=None): return f'```python\n{s}\n```'
    def text(self, s): return f'```text\n{s.rstrip()}\n```'
    def diff(self, s): return f'```diff\n{s}```'
    def html(self, s): return s
    def math(self, s): return f'${s}$'
    def image(self, path, alt): return f'![{alt}]({path})'

class Plain(GitHub):
    "The site's pages as plain Markdown, which the docstrings of the modules link to"
    show_docs = True

class Site(GitHub):
    "Markdown as Zensical reads it"
    show_docs = True
    def link(self, url):
        "Links inside the site become relative, so that the build checks them"
        p,sep,frag = super().link(url).partition('#')
        if p in [blob+o for o in root_files]: p = p.replace(blob, base)
        if not p.startswith(base): return p+sep+frag
        page = Path(p.removeprefix(base) or 'index.html').with_suffix('.md')
        return os.path.relpath(page, self.page.parent).replace(os.sep, '/')+sep+frag
    def symbol(self, name, anchors, source):
        ids = ''.join(f'<a id="{o}"></a>' for o in anchors[1:])
        link = f'[source]({source}){{ .source }}' if source else ''
        return '\n\n'.join(o for o in (ids, f'### {name} {{ #{anchors[0]} }}', link) if o)
    def code(self, s, summary=None):
        "With a `summary`, the code shows after a click on it"
        res = super().code(s)
        return f'??? example "{summary}"\n\n{indent(res, "    ")}' if summary else res
    def text(self, s):
        "Paragraphs with columns apart from those of sentences, which wrap"
        parts = groupby(s.rstrip().split('\n\n'), key=lambda o: '' if re.search(r'\S {2,}\S', o) else '.prose ')
        return '\n\n'.join('``` { .text .output .no-copy '+prose+'}\n'+'\n\n'.join(o)+'\n```' for prose,o in parts)
    def diff(self, s):
        "With what it leads to, to copy, after a click"
        new = '\n'.join(o[1:] for o in s.splitlines() if o[:1]!='-')
        return f'``` {{ .diff .no-copy }}\n{s}```\n\n{self.code(new, "The new code, to copy")}'
    def html(self, s): return f'<div class="output">{s}</div>'
    def math(self, s): return mathml(s)
    def image(self, path, alt): return f'<figure markdown="span">\n![{alt}]({path})\n</figure>'

_diff = re.compile(r'^```diff\n(.*?)^```', re.M|re.S)
_link = re.compile(r'(?P<code>^```.*?^```|`[^`\n]+`)|\]\((?P<url>[^)\s]+)', re.M|re.S)
_math = re.compile(r'(?P<code>^```.*?^```|`[^`\n]+`)|(?<![\\\w$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)',
                   re.M|re.S)

@lru_cache
def documented():
    "Where names are documented that become links: ours; fastai's and fastcore's, except plain words"
    res = {k: v for k,v in NbdevLookup().syms.items() if not re.fullmatch('[a-z]+', k) or str(v[0]).startswith(base)}
    for mod,syms in import_module(f'{cfg.lib_path.name}._modidx').d['syms'].items():
        for k,(page,file) in syms.items():
            name,old = k.removeprefix(f'{mod}.'),res.get(k.removeprefix(f'{mod}.'))
            if mod.split('.')[-1] not in vocabularies: res[name] = f'{base}{page}',file,old[2].replace(old[1], file)
    def wanted(k, v):
        return not re.search(r'(^|\.)_', k) and (not isinstance(v, tuple) or Path(v[1]).stem not in vocabularies)
    return {k: v for k,v in res.items() if wanted(k, v)}

def to_dialect(s, d, names=()):
    "Markdown `s` in dialect `d`: links, formulas, diffs; documented names in back-ticks become links, but for `names`"
    lookup = NbdevLookup()
    lookup.syms = ChainMap(dict.fromkeys(names), documented())
    s = lookup.linkify(s) or ''
    s = re.sub(r'\[([^][]*)\[(`[^`]*`)\]\([^)]*\)([^][]*)\]\(', r'[\1\2\3](', s) # no link in a link
    s = _link.sub(lambda m: m[0] if m['code'] else f']({d.link(m["url"])}', s)
    s = _math.sub(lambda m: m[0] if m['code'] else d.math(m['inline']), s)
    return _diff.sub(lambda m: d.diff(m[1]), s)

# --- Documentation of a symbol

def internal(name, ns):
    "Is the symbol `name` private, or an event of a callback?"
    cls,_,attr = name.rpartition('.')
    return attr.startswith('_') or bool(cls) and attr in getattr(eval(cls, ns), '_methods', ())

def namespace(mod):
    "What a notebook can document: the names in `mod`, to which it exports, or in every module"
    def _dotted(o): return '.'.join(o.relative_to(cfg.lib_path.parent).with_suffix('').parts)
    mods = [f'{cfg.lib_path.name}.{mod}'] if mod else sorted(map(_dotted, cfg.lib_path.rglob('[!_]*.py')))
    return {k: v for o in mods for k,v in vars(import_module(o)).items()}

def brief(s): return re.sub(r'\b(?:[a-z_]\w*\.)+(?=[A-Z])', '', s) # without the modules that classes are from
def type_name(o): return '' if o in (None, inspect.Parameter.empty) else brief(inspect.formatannotation(o).strip("'"))
def default_name(o):
    if o is inspect.Parameter.empty: return ''
    return getattr(o, '__name__', None) or re.sub(r'<function (\w+) at \w+>', r'\1', repr(o))
def returns(func): return '' if inspect.isclass(func) else type_name(inspect.signature(func).return_annotation)

def parameters(func):
    "What `func` is called with; for a fastai callback without the events, which could be passed, too"
    without = 'self',*getattr(func, '_methods', ())
    try: params = inspect.signature(func).parameters
    except ValueError: return [] # a class of tensors, which PyTorch makes in C
    return [o for o in params.values() if o.name not in without]
def comments(func):
    "What the source says about each parameter of `func`, and as `return` about its result"
    if not hasattr(func, '_fields'):
        res = docments(func, returns=not inspect.isclass(func))
        # docments do not reach the fields that a dataclass inherits
        bases = [o for o in getattr(func, '__mro__', ())[1:] if is_dataclass(o)]
        for o in bases: res = docments(o, returns=False) | {k:v for k,v in res.items() if v}
        return res
    # docments do not reach the fields of a NamedTuple
    lines = dedent(inspect.getsource(func)).splitlines()
    fields = [o for o in ast.parse('\n'.join(lines)).body[0].body if isinstance(o, ast.AnnAssign)]
    return {o.target.id: lines[o.end_lineno-1].partition('# ')[2] for o in fields}

def signature(func, name):
    "How to call `func`: on one line, or if that is long with a line for each parameter"
    ps,args = parameters(func),[]
    for p,after in zip(ps, [*ps[1:], None]):
        if p.kind is p.KEYWORD_ONLY and not any(o.startswith('*') for o in args): args.append('*')
        anno,default = type_name(p.annotation),default_name(p.default)
        stars = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        args.append(stars + p.name + (anno and f':{anno}') + (default and f'={default}'))
        if p.kind is p.POSITIONAL_ONLY and not (after and after.kind is p.kind): args.append('/')
    head,line = ('class ' if inspect.isclass(func) else '')+name,', '.join(args)
    tail = f' -> {o}' if (o := returns(func)) else ''
    if len(head+line+tail)>90: line = '\n    '+',\n    '.join(args)+'\n'
    return f'{head}({line}){tail}'

def param_table(func, d):
    "A row for each parameter of `func`, and one for its result, that has a comment"
    def code(s):
        # in back-ticks, not every dialect reads \|
        if '|' in s: return f'<code>{escape(s).replace("|", "&#124;")}</code>'
        return s and f'`{s}`'
    ps,texts = parameters(func),comments(func)
    names = [o.name for o in ps]
    def text(key): return to_dialect(' '.join((texts.get(key) or '').split()).replace('|', r'\|'), d, names)
    rows = [(f'`{o.name}`', text(o.name), code(default_name(o.default)), code(type_name(o.annotation))) for o in ps]
    rows = [o for o in (*rows, ('*returns*', text('return'), '', code(returns(func)))) if o[1]]
    # on a phone what comes after the second column is out of sight
    cols = [o for o in zip(('parameter', 'meaning', 'default', 'type'), *rows) if any(o[1:])]
    lines = [f'| {" | ".join(o)} |' for o in zip(*cols)]
    return '\n'.join([lines[0], '|---'*len(cols)+'|', *lines[1:]]) if rows else ''

def member_table(cls, name, shown, d):
    "A row for each public method and property of the class `cls` itself, without events; those in `shown` with a link"
    rows = []
    for k,v in vars(cls).items():
        func,doc = getattr(cls, k),inspect.getdoc(getattr(cls, k))
        if internal(f'C.{k}', dict(C=cls)) or not doc: continue
        if not (isinstance(v, property) or inspect.isroutine(func)): continue
        args = [] if isinstance(v, property) else [o.name for o in parameters(func)]
        head = f'`{k}`' if isinstance(v, property) else f'`{k}({", ".join(args)})`'
        if f'{name}.{k}' in shown: head = f'[{head}](#{name.lower()}.{k.lower()})'
        text = to_dialect(doc.splitlines()[0].replace('|', r'\|'), d, args)
        rows.append(f'| {head} | {text} |')
    return '\n'.join(['| member | what it does |', '|---|---|', *rows]) if rows else ''

def subject(name, ns):
    "The function or class that the symbol `name` is or, as a property, calls; and the line where it begins"
    sym = eval(name, ns)
    func = sym.fget if isinstance(sym, property) else inspect.unwrap(sym, stop=lambda o: hasattr(o, '__signature__'))
    return func,inspect.getsourcelines(func)[1]

def symbol_md(name, ns, shown, d):
    "For the symbol `name`: heading, link to the source, signature, docstring, tables of parameters and of members"
    (func,line),lookup = subject(name, ns),NbdevLookup()
    # Links to methods without a heading lead to their class
    anchors = [name, *(o for o in lookup.syms if o.startswith(f'{name}.') and '._' not in o and o not in shown)]
    # not the lookup's, where two modules may have the name
    file = Path(inspect.getsourcefile(func)).relative_to(cfg.lib_path.parent).as_posix()
    source = f'{cfg.git_url}/blob/{cfg.branch}/{file}#L{line}' if isinstance(lookup[name], tuple) else None
    res = [d.symbol(name, [o.lower() for o in anchors], source)]
    if not callable(func): return '\n\n'.join([*res, to_dialect(docstring(func), d)])
    text = to_dialect(docstring(func), d, [o.name for o in parameters(func)])
    res += [f'```python\n{signature(func, name)}\n```', text, param_table(func, d)]
    if inspect.isclass(func): res.append(member_table(func, name, shown, d))
    return '\n\n'.join(filter(None, res))

# --- Notebooks

class Filter(FilterDefaults):
    """What nbdev makes of directives; but notebooks are not run for their `show_doc`s, and `to_dialect` makes the links

    Nor are magics removed: no notebook has one, and nbdev would read its settings again at each cell."""
    def base_procs(self): return [o for o in super().base_procs() if o not in (exec_show_docs, add_links, clean_magics)]

def options(cell):
    "Split a cell into its `#|` options and the rest"
    opts,lines = {},cell.source.splitlines()
    while lines and (m := re.match(r'#\|\s*([\w-]+)\s*:?\s*(.*)', lines[0])):
        opts[m[1]] = m[2].strip().strip('"\'')
        lines.pop(0)
    return opts,'\n'.join(lines).strip()

def output(o, d, save):
    "One output of a cell, if it has something to show; `save` takes a picture's bytes"
    if o.output_type=='stream': return d.text(''.join(o.text)) if o.name=='stdout' else None
    data = {k: v if isinstance(v, str) else ''.join(v) for k,v in o.data.items()}
    if 'text/html' in data:
        h = re.sub(r'<style.*?</style>\s*', '', data['text/html'], flags=re.S)
        h = re.sub(r' (class="(dataframe|fastprogress)"|border="1"|style="text-align: right;")', '', h)
        return d.html(re.sub(r'\n\s*', '', h)) if re.sub('<[^>]*>', '', h).strip() else None
    if 'text/markdown' in data: return to_dialect(data['text/markdown'], d)
    if 'image/png' in data: return save(base64.b64decode(data['image/png']))
    return d.text(data['text/plain']) if 'text/plain' in data else None

def convert(fn, d, files):
    "Title, description and Markdown of the notebook at `fn`, in dialect `d`; its pictures go to the folder `files`"
    nb = read_nb(fn)
    mod = next((o.directives['default_exp'] for o in nb.cells if 'default_exp' in o.directives), None)
    ns = namespace(mod) if d.show_docs else {}
    Filter()(nb)
    symbols = {o.id: m[1] for o in nb.cells if (m := re.fullmatch(r'show_doc\((.*)\)', options(o)[1]))}
    left_out = [k for k,v in symbols.items() if not d.show_docs or internal(v, ns)]
    nb.cells = [o for o in nb.cells if o.id not in left_out]
    shown = {v for k,v in symbols.items() if k not in left_out}
    res,cells = [],[]
    # nbdev documents what a cell defines from the last to the first
    for is_symbol,run in groupby(nb.cells, key=lambda c: c.id in symbols):
        cells += sorted(run, key=lambda c: subject(symbols[c.id], ns)[1]) if is_symbol else run
    for c in cells:
        opts,src = options(c)
        if c.cell_type=='markdown' and not src.startswith(('<!-- WARNING',badge)): res.append(to_dialect(src, d))
        if c.cell_type!='code': continue
        if c.id in symbols: res.append(symbol_md(symbols[c.id], ns, shown, d))
        elif src and opts.get('echo')!='false': res.append(d.code(src, opts.get('code-summary')))
        for i,o in enumerate(c.get('outputs', [])):
            def save(data):
                files.mkdir(parents=True, exist_ok=True)
                (files/f'{c.id}-{i}.png').write_bytes(data)
                return d.image(f'{files.name}/{c.id}-{i}.png', opts.get('fig-alt', ''))
            if md := output(o, d, save): res.append(md)
    about = nb.frontmatter_
    return about.get('title', fn.stem),about.get('description', ''),'\n\n'.join(o for o in res if o)+'\n'

def convert_file(fn, d):
    "Title, description and Markdown of the file `fn` of the root; links lead to the site, or else to the repository"
    title,desc,md = re.match(r'# ([^\n]*)\n+(?:> ([^\n]*)\n)?(.*)', fn.read_text(encoding='utf-8'), re.S).groups()
    def link(m):
        if m['code'] or re.match('https?:|#', m['url']): return m[0]
        return ']('+(m['url'].removeprefix('nbs/') if '.ipynb' in m['url'] else blob+m['url'])
    return title,desc or '',to_dialect(_link.sub(link, md), d)

def first_sentence(doc): return re.split(r'(?<=[.?!])\s|\n\n', doc, maxsplit=1)[0].replace('\n', ' ')

def name_index(d):
    "Title, description and Markdown of the page with all public names by module: those of users first, then internals"
    names = [o.partition('.')[2] for o in import_module(f'{cfg.lib_path.name}._modidx').d['syms']]
    names = [o for o in names if o.split('.')[-1] not in vocabularies]
    res = ['The names that a user needs. Those at the end hold the package together, and may change in any version.']
    for name in sorted(names, key=lambda o: o in internals):
        mod = f'{cfg.lib_path.name}.{name}'
        module = import_module(mod)
        values = {o: getattr(module, o) for o in getattr(module, '__all__', ())}
        docs = {k: first_sentence(inspect.getdoc(v)).replace('|', r'\|') for k,v in values.items()
                if getattr(v, '__module__', None)==mod and inspect.getdoc(v)}
        rows = [f'| `{k}` | {v} |' for k,v in docs.items()]
        head = f'## {name}'+' (internal)'*(name in internals)
        table = ['| name | what it is |', '|---|---|', *(to_dialect(o, d) for o in rows)]
        if rows: res.append('\n'.join([head, '', *table]))
    return 'All names','What the package defines, module by module','\n\n'.join(res)+'\n'

# --- The two commands

def check_sidebar(found):
    "Zensical doesn't see whether each page of `found` is in the sidebar, nor whether each there exists"
    listed,where = {o for part in sidebar.values() for o in part},'`nav` of docs/mkdocs.yml'
    if lost := sorted({*found}-listed): sys.exit(f'{", ".join(lost)}: not in the sidebar. Add it to {where}.')
    if gone := sorted(listed-{*found}): sys.exit(f'{", ".join(gone)}: in {where}, but there is no such page.')

def on_github(fn): return blob+fn.relative_to(cfg.config_path).as_posix()
def in_colab(fn): return on_github(fn).replace('github.com', 'colab.research.google.com/github')

def notebook_links(fn):
    "Links to the notebook `fn` on GitHub and, if it installs this package there, in Colab"
    links = f'[Notebook]({on_github(fn)})'
    return links+f' · [Open in Colab]({in_colab(fn)})' if install in fn.read_text(encoding='utf-8') else links

def site_page(title, desc, md, links=''):
    "A page for Zensical: its metadata, title, links, description and text"
    meta = dict(description=re.sub(r'[`*[]|\]\([^)]*\)', '', desc or f'{title} of {cfg.title}'))
    if title==cfg.title: meta['title'] = cfg.description # else the browser shows the site's name twice
    meta = ''.join(f'{k}: {json.dumps(v)}\n' for k,v in meta.items())
    links,desc = links and f'{links}\n{{ .links data-search-exclude=1 }}',desc and f'{desc}\n{{ .lead }}'
    return '\n\n'.join(o for o in (f'---\n{meta}---', f'# {title}', links, desc, md) if o)

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')

def llms(about):
    "llms.txt: what nbdev writes from the home page, and the plain pages, with title and description from `about`"
    def _line(page): return f'- [{about[page][0]}]({base}{Path(page).with_suffix(".html.md")}): {about[page][1]}'
    parts = {k: [_line(o) for o in v if o in about] for k,v in sidebar.items()}
    lists = ['\n'.join([f'## {k}\n', *v]) for k,v in parts.items() if v]
    return '\n\n'.join([(cfg.path('nbs_path')/'llms.txt').read_text(encoding='utf-8').strip(), *lists])+'\n'

def pages(dest):
    "Write to the folder `dest` a page for each notebook, each page as plain Markdown, llms.txt and mkdocs.yml"
    root = cfg.path('nbs_path')
    nbs = {nbpath2html(o.relative_to(root)).with_suffix('.md'): o for o in sorted(nbglob(root, as_path=True))}
    check_sidebar([*(o.as_posix() for o in nbs), generated, *root_files])
    shutil.rmtree(dest, ignore_errors=True)
    about = {}
    for page,fn in nbs.items():
        html,plain = dest/'pages'/page,(dest/'md'/page).with_suffix('.html.md')
        write(html, site_page(*convert(fn, Site(page), html.with_suffix('')), notebook_links(fn)))
        title,desc,md = convert(fn, Plain(page), plain.with_name(page.stem))
        about[page.as_posix()] = title,desc
        write(plain, f'# {title}\n\n> {desc}\n\n{md}')
    write(dest/'md/llms.txt', llms(about))
    for name in root_files:
        write(dest/'pages'/name, site_page(*convert_file(cfg.config_path/name, Site(Path(name)))))
    write(dest/'pages'/generated, site_page(*name_index(Site(Path(generated)))))
    shutil.copytree(here/'assets', dest/'pages', dirs_exist_ok=True)
    site = dict(INHERIT=os.path.relpath(here/'mkdocs.yml', dest), site_name=cfg.title, site_url=base,
                site_description=cfg.description, repo_url=cfg.git_url, repo_name=f'GitHub, version {cfg.version}',
                docs_dir='pages', site_dir='site', theme=dict(custom_dir=os.path.relpath(here/'theme', dest)))
    write(dest/'mkdocs.yml', json.dumps(site, indent=1))

def readme(folder):
    "README.md as the index notebook has it; its pictures go to README_files in `folder`"
    nb = cfg.path('nbs_path')/cfg.readme_nb
    title,desc,md = convert(nb, GitHub(), folder/'README_files')
    made_from = nb.relative_to(cfg.config_path).as_posix()
    note = f'<!-- Made from {made_from} by docs/pages.py: edit the notebook, then make check -->'
    return f'# {title}\n\n> {desc}\n\n{md}\n{note}\n' # at the end, as what one sees first is for users

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('what', choices=['pages', 'readme'], help='pages: to _proc/, for `make docs`. readme: to README.md')
    os.chdir(cfg.config_path) # nbdev's link lookup reads the configuration from here
    if p.parse_args().what=='pages': pages(cfg.config_path/'_proc')
    else: (cfg.config_path/'README.md').write_text(readme(cfg.config_path), encoding='utf-8')

if __name__=='__main__': main()
