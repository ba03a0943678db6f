"""The built site, in headless Chromium: it reads well on a phone and on a wide screen, is found by search, links work

Nothing is fetched from outside. It takes long because the site is built, and each page looked at in two widths."""
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from urllib.parse import unquote

from learners import *
from test_docs import pages,words

pytestmark = pytest.mark.slow
zensical = Path(sys.executable).with_name('zensical')
chromium = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
if not zensical.exists(): pytest.skip('needs the docs extra', allow_module_level=True)

@pytest.fixture(scope='module')
def site(tmp_path_factory, flags):
    "Folder with the built site; `strict` fails where a link inside it leads nowhere"
    # Said here, too, as this is set up before a test's marks are looked at
    if 'slow' not in flags: pytest.skip('needs --flags slow')
    tmp = tmp_path_factory.mktemp('site')
    pages.pages(tmp)
    subprocess.run([zensical, 'build', '--strict', '--clean', '--config-file', tmp/'mkdocs.yml'], check=True)
    return tmp/'site'

@pytest.fixture(scope='module')
def new_tab(site):
    "Opens tabs in headless Chromium, which finds no other host and shows scrollbars"
    if not chromium: pytest.skip('needs Chromium')
    playwright = pytest.importorskip('playwright.sync_api', reason='needs the dev extra')
    def new_tab(width=1400, **kwargs):
        "A tab in place of the one before, of which it remembers nothing, and the list that gets what goes wrong in it"
        for o in chrome.contexts: o.close()
        size,errors,url = dict(width=width, height=900),[],f'http://127.0.0.1:{server.server_port}/'
        tab = chrome.new_page(base_url=url, viewport=size, is_mobile=width<600, **kwargs)
        tab.set_default_timeout(120_000) # milliseconds, as the machine may have other work
        tab.on('pageerror', lambda o: errors.append(o.message))
        tab.on('console', lambda o: o.type in ('error', 'warning', 'assert') and errors.append(o.text))
        tab.on('requestfailed', lambda o: o.failure!='net::ERR_ABORTED' and errors.append(f'{o.url}: {o.failure}'))
        return tab,errors
    Silent = type('Silent', (SimpleHTTPRequestHandler,), dict(log_message=noop))
    args = ['--disable-gpu', '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1']
    with (ThreadingHTTPServer(('127.0.0.1', 0), partial(Silent, directory=site)) as server,
          playwright.sync_playwright() as p, p.chromium.launch(executable_path=chromium, args=args,
            ignore_default_args=['--hide-scrollbars']) as chrome):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield new_tab
        server.shutdown()

@pytest.fixture(scope='module')
def texts(site):
    "The HTML of each page"
    found = sorted({*site.rglob('*.html')}-{site/'404.html'})
    return {o.relative_to(site).as_posix(): o.read_text(encoding='utf-8') for o in found}

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
    const text = o => o.textContent.trim().slice(0, 60)
    const wider = o => o.scrollWidth > o.clientWidth+1
    const longest = o => o.textContent.split('\\n').sort((a,b) => b.length-a.length)[0]
    return {
        scrolls: document.documentElement.scrollWidth > wide,
        images:  images.filter(o => !o.naturalWidth || !o.alt.trim()).map(o => o.src),
        tables:  [...article.querySelectorAll('table')].filter(o => !reachable(o)).map(text),
        code:    [...article.querySelectorAll('.highlight:not(.output) pre > code')].filter(wider).map(longest),
    } }"""

widths = phone,wide = 390,1600

@pytest.fixture(scope='module')
def looks(texts, new_tab):
    "What `look` and the console say about each page, on a phone and in a wide window"
    (tab,errors),res = new_tab(phone),{}
    for i,page in enumerate(texts):
        errors.clear()
        tab.goto(page)
        for width in widths[::(-1)**i]: # first that of the page before: to change it takes long
            tab.set_viewport_size(dict(width=width, height=900))
            res[page,width] = dict(tab.evaluate(look), errors=[*errors])
    return res

def refuse(bad, what):
    "Fail with a line for each page in `bad` that has something to say"
    lines = [f'{page}: {o}' for page,o in bad.items() if o]
    if lines: pytest.fail('\n  '.join([f'{what}:', *lines]), pytrace=False)

looked_for = dict(
    errors  = (widths, 'errors in the console'),
    images  = ([phone], 'images that do not load or have no alternative text'),
    scrolls = (widths, 'pages that scroll sideways'),
    tables  = (widths, 'tables with a part that cannot be reached'),
    code    = ([wide], 'lines of code that are cut, where they should have at most 100 columns'))

@pytest.mark.parametrize('key', looked_for)
def test_look(key, looks):
    where,what = looked_for[key]
    refuse({k: v[key] for k,v in looks.items() if k[1] in where}, what)

answers = [ # words that people type, and the page that answers
    ('migrate', 'howto/migrate'), ('nan', 'howto/troubleshooting'), ('Lightning', 'howto/from_other_libraries'),
    ('gradient accumulation', 'howto/accumulation_and_clipping'), ('how does it work', 'explanations/training_step'),
    ('loss scale', 'core/loss_scale'), ('memory', 'howto/less_memory'), ('benchmark', 'tutorials/measure'),
    ('huggingface', 'howto/other_trainers'), ('early stopping', 'howto/examples'), ('resume', 'howto/checkpoints'),
    ('undo', 'howto/migrate'), ('back to float32', 'howto/migrate'), ('keep layer in float32', 'howto/keep'),
    ('multi-GPU', 'howto/several_gpus'), ('DDP', 'howto/several_gpus'), ('fit into 16 GB', 'howto/it_doesnt_fit'),
    ('ONNX', 'howto/examples'), ('wandb', 'howto/examples'), ('predict in float32', 'howto/examples'),
    ('own loop clipping', 'tutorials/your_own_loop'), ('two optimizers', 'howto/two_networks'),
    ('actor critic', 'howto/two_networks'), ('loss with exp and log in float16', 'howto/own_losses'),
    ('resume after Ctrl-C', 'howto/examples'), ('what went wrong at night', 'core/replay'),
    ('gradient accumulation two optimizers', 'tutorials/your_own_loop'), ('cross-validation', 'howto/kfold'),
    ('segmentation Dice float16', 'howto/segmentation'), ('nan after epochs', 'howto/troubleshooting'),
    *words.items()]

def test_search(new_tab):
    "The first ten results have the page that answers; where nothing is found, it says so until something is"
    tab,errors = new_tab()
    tab.goto('index.html')
    tab.click('.md-search__button')
    for typed,page in answers:
        tab.fill('input:focus', '')
        tab.wait_for_selector('ol a', state='detached')
        tab.fill('input:focus', typed)
        tab.wait_for_selector('ol a')
        res = tab.locator('ol a').evaluate_all('found => found.map(o => o.href)')
        assert any(page in o for o in res), (typed,res)
    tab.fill('input:focus', 'qqzzqq')
    tab.wait_for_selector('.nothing-found')
    tab.fill('input:focus', 'nan')
    tab.wait_for_selector('ol a')
    tab.wait_for_selector('.nothing-found', state='detached')
    assert errors==[]

@pytest.mark.parametrize('scheme', ['light','dark'])
def test_plots_in_the_dark(scheme, new_tab):
    "Are inverted, as they are drawn on white"
    tab,_ = new_tab(color_scheme=scheme)
    tab.goto('core/loss_scale.html')
    style = tab.evaluate("getComputedStyle(document.querySelector('figure img')).filter")
    assert ('invert' in style)==(scheme=='dark')

@pytest.mark.parametrize('pattern', ['<title>(.*?)</title>','<meta name="description" content="(.*?)"'])
def test_heads(pattern, texts):
    "Each page has a title and a description, and shares them with no other"
    found = {page:re.findall(pattern, o, re.S)[:1] for page,o in texts.items()}
    refuse({page:not o or [*found.values()].count(o)>1 for page,o in found.items()}, f'without one own {pattern}')

def test_links_to_the_repository(texts):
    "Its files exist"
    def _lost(text):
        files = re.findall(rf'(?:href|src)="{re.escape(pages.blob)}([^"#]*)', text)
        return [o for o in files if not (root/unquote(o)).exists()]
    refuse({page:_lost(o) for page,o in texts.items()}, 'links to files that are not there')

def test_links_of_readme(texts):
    "They lead to pages and headings of the site"
    links = re.findall(rf'\]\({re.escape(pages.base)}([^)]*)\)', (root/'README.md').read_text(encoding='utf-8'))
    def _broken(link):
        page,_,anchor = link.partition('#')
        return page and (page not in texts or bool(anchor) and f'id="{anchor}"' not in texts[page])
    assert len(links)>20 and [o for o in links if _broken(o)]==[]
