"""The built site, in headless Chromium: links, search, menu, both colour schemes, narrow and wide screens

Nothing is fetched from outside. It takes long because the site is built, and each page looked at in several widths."""
import importlib.util,shutil,subprocess,sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote,urljoin

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip('latex2mathml', reason='needs the docs extra')
zensical = Path(sys.executable).with_name('zensical')
chromium = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
if not zensical.exists(): pytest.skip('needs the docs extra', allow_module_level=True)
root = Path(__file__).resolve().parent.parent

spec = importlib.util.spec_from_file_location('pages', root/'docs/pages.py')
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

# --- The site, and a browser

@pytest.fixture(scope='module')
def site(tmp_path_factory, flags):
    "Folder with the built site"
    # Said here, too, as this is set up before a test's marks are looked at
    if 'slow' not in flags: pytest.skip('needs --flags slow')
    tmp = tmp_path_factory.mktemp('site')
    pages.pages(tmp)
    subprocess.run([zensical, 'build', '--strict', '--clean', '--config-file', tmp/'mkdocs.yml'], check=True)
    return tmp/'site'

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

@pytest.fixture(scope='module')
def url(site):
    with ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/'
        server.shutdown()

@pytest.fixture(scope='module')
def new_tab(url):
    "Opens tabs in headless Chromium, which finds no other host and shows scrollbars"
    if not chromium: pytest.skip('needs Chromium')
    playwright = pytest.importorskip('playwright.sync_api', reason='needs the dev extra')
    def new_tab(width=1400, **kwargs):
        "A tab in place of the one before, of which it remembers nothing, and the list that gets what goes wrong in it"
        for o in chrome.contexts: o.close()
        size,errors = dict(width=width, height=900),[]
        tab = chrome.new_page(base_url=url, viewport=size, is_mobile=width<600, **kwargs)
        tab.set_default_timeout(120_000) # milliseconds, as the machine may have other work
        tab.on('pageerror', lambda o: errors.append(o.message))
        tab.on('console', lambda o: o.type in ('error', 'warning', 'assert') and errors.append(o.text))
        tab.on('requestfailed', lambda o: o.failure!='net::ERR_ABORTED' and errors.append(f'{o.url}: {o.failure}'))
        return tab,errors
    args = ['--disable-gpu', '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1']
    with (playwright.sync_playwright() as p, p.chromium.launch(executable_path=chromium, args=args,
            ignore_default_args=['--hide-scrollbars']) as chrome): yield new_tab

@pytest.fixture(scope='module')
def html(site): return sorted(o.relative_to(site).as_posix() for o in site.rglob('*.html') if o.name!='404.html')

# What is wrong with how a page is laid out, where it can be seen from inside
look = """async () => {
    const article = document.querySelector('article'), wide = document.documentElement.clientWidth
    const images = [...article.querySelectorAll('img')]
    images.forEach(o => o.loading = 'eager')
    await Promise.allSettled(images.map(o => o.decode()))
    const reachable = o => { // does scrolling inside the page bring the right edge of `o` into view?
        for (let p = o.parentElement; p; p = p.parentElement)
            if (getComputedStyle(p).overflowX=='auto') p.scrollLeft = 1e6
        return o.getBoundingClientRect().right <= wide+1 }
    const all = [...article.querySelectorAll('*')], text = o => o.textContent.trim().slice(0, 60)
    const does = (o, ...what) => what.includes(getComputedStyle(o).overflowX)
    const wider = o => o.scrollWidth > o.clientWidth+1
    const longest = o => o.textContent.split('\\n').sort((a,b) => b.length-a.length)[0]
    return {
        scrolls: document.documentElement.scrollWidth > wide,
        images:  images.filter(o => !o.naturalWidth || !o.alt.trim()).map(o => o.src),
        cut:     all.filter(o => does(o, 'hidden', 'clip') && wider(o) && o.clientWidth > 2).map(text),
        hints:   all.filter(o => does(o, 'auto', 'scroll') && wider(o) &&
                     getComputedStyle(o).backgroundImage=='none').map(text),
        narrow:  [...article.querySelectorAll('td:last-child')].filter(o =>
                     !o.closest('.output') && o.textContent.trim().length > 40 && o.clientWidth < 100).map(text),
        tables:  [...article.querySelectorAll('table')].filter(o => !reachable(o)).map(text),
        code:    [...article.querySelectorAll('.highlight:not(.output) pre > code')].filter(wider).map(longest),
        others:  all.filter(o => does(o, 'auto', 'scroll') && wider(o) && !o.closest('.highlight:not(.prose)') &&
                     !o.closest('table') && !o.querySelector('table')).map(text)} }"""

widths = [390, 768, 1280, 1600]

@pytest.fixture(scope='module')
def looks(html, new_tab):
    "What `look` and the console say about each page, in windows of all `widths`"
    res = {}
    for some in ([390], [1600, 1280, 768]): # a phone, and a window that gets narrower
        tab,errors = new_tab(some[0])
        for page in html:
            errors.clear()
            tab.goto(page)
            for width in some:
                tab.set_viewport_size(dict(width=width, height=900))
                res[page,width] = dict(tab.evaluate(look), errors=[*errors])
    return res

def refuse(bad, what):
    "Fail with a line for each page in `bad` that has something to say"
    lines = [f'{page}: {o}' for page,o in bad.items() if o]
    if lines: pytest.fail('\n  '.join([f'{what}:', *lines]), pytrace=False)

looked_for = dict(
    errors  = ([390, 768], 'errors in the console'), # those of all widths
    images  = ([390],  'images that do not load or have no alternative text'),
    scrolls = (widths, 'pages that scroll sideways'),
    cut     = (widths, 'what is wider than its box, which hides the rest'),
    hints   = (widths, 'what scrolls sideways in a page, and does not show it by a shadow'),
    narrow  = ([390],  'sentences in a column of some letters'),
    tables  = (widths, 'tables with a part that cannot be reached'),
    others  = (widths, 'what scrolls sideways in a page, and is neither code nor a table'),
    code    = ([1600], 'lines of code that are cut, where they should have at most 100 columns'))

@pytest.mark.parametrize('key', looked_for)
def test_look(key, looks):
    where,what = looked_for[key]
    refuse({k: v[key] for k,v in looks.items() if k[1] in where}, what)

def test_schemes(new_tab):
    "Colours, also those of plots, are what the system asks for until the header's button changes them for all pages"
    def dark(): return tab.evaluate("""[
        getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(o => o<50),
        getComputedStyle(document.querySelector('figure img')).filter.includes('invert')]""")
    for scheme in ('light', 'dark'):
        tab,_ = new_tab(color_scheme=scheme)
        tab.goto('loss_scale.html')
        assert dark()==[scheme=='dark']*2
    tab.click('label[for=__palette_0]')
    tab.wait_for_selector('body[data-md-color-scheme=default]')
    assert dark()==[False, False]
    tab.goto('recorder.html')
    assert dark()==[False, False]

def test_menu(new_tab):
    "On a narrow screen the menu is hidden, opens at the button, and leads to another page"
    tab,errors = new_tab(400)
    tab.goto('index.html')
    left = "document.querySelector('.md-sidebar--primary').getBoundingClientRect().left"
    assert tab.evaluate(left)<0
    tab.click('.md-header label[for=__drawer]')
    tab.wait_for_function(f'{left}>=0')
    assert not tab.evaluate('document.documentElement.scrollWidth > innerWidth')
    tab.dispatch_event('.md-sidebar--primary a[href$="/keep.html"]', 'click')
    tab.wait_for_url('**/howto/keep.html')
    assert errors==[]

answers = [ # words that people type, and the page that answers
    ('migrate', 'howto/migrate'), ('nan', 'howto/troubleshooting'), ('Lightning', 'howto/from_other_libraries'),
    ('gradient accumulation', 'howto/accumulation_and_clipping'), ('fine_tune', ''),
    ('inference', 'explanations/training_step'), ('predict', 'explanations/training_step'),
    ('how does it work', 'explanations/training_step'), ('mixed precision explained', 'explanations/training_step'),
    ('loss scale', 'loss_scale'), ('memory', 'howto/less_memory'), ('benchmark', 'tutorials/measure'),
    ('Trainer', 'howto/other_trainers'), ('rescue', 'callback'), ('fp8', 'fp8'), ('thread', 'half'),
    ('laptop', 'howto/which_precision'), ('Hugging Face', 'howto/examples'), ('huggingface', 'howto/other_trainers'),
    ('early stopping', 'howto/examples'), ('custom loss scale', 'howto/examples'), ('TorchScript', 'howto/examples'),
    ('ONNX', 'howto/examples'), ('wandb', 'howto/examples'), ('TensorBoard', 'howto/examples'),
    ('resume', 'howto/checkpoints'), ('checkup', 'checkup'), ('TF32', 'howto/fast_on_a_gpu'), ('LoRA', 'howto/works_with'),
    ('SAM', 'howto/works_with')]

def test_search(new_tab):
    "The first ten results have the page that answers"
    tab,errors = new_tab()
    tab.goto('index.html')
    tab.click('.md-search__button')
    for words,page in answers:
        tab.fill('input:focus', '')
        tab.wait_for_selector('ol a', state='detached')
        tab.fill('input:focus', words)
        tab.wait_for_selector('ol a')
        res = tab.locator('ol a').evaluate_all('found => found.map(o => o.href)')
        assert any(page in o for o in res), (words,res)
    assert errors==[]

def test_search_finds_nothing(new_tab):
    "It says so, until it finds something"
    tab,errors = new_tab()
    tab.goto('index.html')
    tab.click('.md-search__button')
    tab.fill('input:focus', 'qqzzqq')
    tab.wait_for_selector('.nothing-found')
    tab.fill('input:focus', 'nan')
    tab.wait_for_selector('ol a')
    tab.wait_for_selector('.nothing-found', state='detached')
    assert errors==[]

# --- The files

class Page(HTMLParser):
    "Anchors, links and description of a page"
    def __init__(self, text):
        super().__init__()
        self.ids,self.links,self.about = set(),set(),{}
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[o] for o in ('id', 'name') if attrs.get(o)}
        self.links |= {attrs[o] for o in ('href', 'src') if attrs.get(o)}
        if tag=='meta' and 'name' in attrs: self.about[attrs['name']] = attrs.get('content')
        self.tag = tag
    def handle_data(self, data):
        if getattr(self, 'tag', None)=='title' and data.strip(): self.about.setdefault('title', data.strip())

@pytest.fixture(scope='module')
def parsed(site, html): return {o: Page((site/o).read_text(encoding='utf-8')) for o in html}

def broken(link, page, parsed, site):
    "Does `link` on `page` lead to a file of the site or repository that isn't there, or to an anchor that isn't?"
    url,_,anchor = urljoin(pages.base+page, link).partition('#')
    if url.startswith(pages.blob): return not (root/unquote(url.removeprefix(pages.blob))).exists()
    if not url.startswith(pages.base): return False
    name = unquote(url.removeprefix(pages.base)) or 'index.html'
    if not (site/name).is_file(): return True
    return bool(anchor) and name in parsed and unquote(anchor) not in parsed[name].ids

def test_links(parsed, site):
    refuse({page: [o for o in p.links if broken(o, page, parsed, site)] for page,p in parsed.items()}, 'broken links')

def test_descriptions(parsed):
    "Each page has a title and a description, and shares them with no other"
    for key in ('title', 'description'):
        by = {}
        for page,p in parsed.items(): by.setdefault(p.about.get(key), []).append(page)
        refuse({k: v for k,v in by.items() if len(v)>1 or not k}, f'pages without a {key}, or with that of another')
    assert parsed['index.html'].about['title'].count(pages.cfg.title)==1

def test_header(parsed, site):
    "Each page names the version and links to the repository"
    for page,p in parsed.items():
        assert pages.cfg.git_url in p.links
        assert f'version {pages.cfg.version}' in (site/page).read_text(encoding='utf-8')
