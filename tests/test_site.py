"The built site, in headless Chromium: links, search, menu, both colour schemes, narrow and wide screens. Nothing is fetched from outside. It takes long because the site is built, and each page loaded in several widths"
import importlib.util,json,os,select,shutil,subprocess,sys,time
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
    if 'slow' not in flags: pytest.skip('needs --flags slow') # said here, too, as this is set up before a test's marks are looked at
    tmp = tmp_path_factory.mktemp('site')
    pages.pages(tmp)
    subprocess.run([zensical, 'build', '--strict', '--clean', '--config-file', tmp/'mkdocs.yml'], check=True)
    return tmp/'site'

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

class Browser:
    "Headless Chromium, driven by its DevTools protocol: JSON messages over a pipe, with a zero byte after each"
    def __init__(self, url, profile):
        (its_in,self.to),(self.fro,its_out) = os.pipe(),os.pipe()
        args = [chromium, '--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-dev-shm-usage',
                '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1', f'--user-data-dir={profile}', '--remote-debugging-pipe']
        # It reads from file descriptor 3 and writes to 4
        self.process = subprocess.Popen(['bash', '-c', f'exec "$@" 3<&{its_in} 4>&{its_out}', 'bash', *args], pass_fds=(its_in,its_out),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(its_in), os.close(its_out)
        self.url,self.sent,self.buffer,self.events = url,0,b'',[]
        self.new_tab()

    def new_tab(self):
        "Go on in a tab that remembers nothing from other tabs"
        self.session = {}
        profile = self.call('Target.createBrowserContext')['browserContextId']
        tab = self.call('Target.createTarget', url='about:blank', browserContextId=profile)['targetId']
        self.session = dict(sessionId=self.call('Target.attachToTarget', targetId=tab, flatten=True)['sessionId'])
        for o in ('Page', 'Runtime', 'Log', 'Network'): self.call(f'{o}.enable')

    def read(self, seconds=40):
        "The next message"
        while b'\0' not in self.buffer:
            if not select.select([self.fro], [], [], seconds)[0]: raise TimeoutError('no answer from Chromium')
            data = os.read(self.fro, 1<<16)
            if not data: raise RuntimeError('Chromium has ended')
            self.buffer += data
        message,_,self.buffer = self.buffer.partition(b'\0')
        return json.loads(message)

    def call(self, method, **params):
        "What Chromium answers to `method`; events before the answer go to `events`"
        self.sent += 1
        os.write(self.to, json.dumps(dict(id=self.sent, method=method, params=params, **self.session)).encode()+b'\0')
        while (message := self.read()).get('id')!=self.sent: self.events.append(message)
        assert 'error' not in message, message
        return message['result']

    def js(self, code):
        "The value of the JavaScript expression `code`, awaited"
        res = self.call('Runtime.evaluate', expression=code, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in res, res
        return res['result'].get('value')

    def wait(self, code, seconds=10):
        "The value of `code` as soon as it is true"
        end = time.time()+seconds
        while not (res := self.js(code)):
            assert time.time()<end, f'still false: {code}'
            time.sleep(.05)
        return res

    def resize(self, width): self.call('Emulation.setDeviceMetricsOverride', width=width, height=900, deviceScaleFactor=1, mobile=width<600)

    def open(self, page, width=1400, scheme='light'):
        "Load `page` for a reader whose system asks for `scheme`"
        self.resize(width)
        self.call('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value=scheme)])
        self.events = []
        self.call('Page.navigate', url=urljoin(self.url, page))
        self.loaded()

    def loaded(self):
        "Wait until a page has been loaded since `events` was empty"
        while not any(o.get('method')=='Page.loadEventFired' for o in self.events): self.events.append(self.read())

    def errors(self):
        "What went wrong since `open`"
        def wrong(method, params):
            return (method=='Runtime.exceptionThrown' or method=='Network.loadingFailed' and not params.get('canceled')
                    or method=='Runtime.consoleAPICalled' and params['type'] in ('error', 'warning', 'assert')
                    or method=='Log.entryAdded' and params['entry']['level'] in ('error', 'warning'))
        return [o for o in self.events if wrong(o.get('method'), o.get('params'))]

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.to), os.close(self.fro)

@pytest.fixture(scope='module')
def browser(site, tmp_path_factory):
    if not chromium: pytest.skip('needs Chromium')
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=site))
    Thread(target=server.serve_forever, daemon=True).start()
    res = Browser(f'http://127.0.0.1:{server.server_port}/', tmp_path_factory.mktemp('profile'))
    yield res
    res.close()
    server.shutdown()

@pytest.fixture(scope='module')
def html(site): return sorted(o.relative_to(site).as_posix() for o in site.rglob('*.html') if o.name!='404.html')

# What is wrong with how a page is laid out, where it can be seen from inside
look = """(async () => {
    const article = document.querySelector('article'), wide = document.documentElement.clientWidth
    const images = [...article.querySelectorAll('img')]
    images.forEach(o => o.loading = 'eager')
    await Promise.allSettled(images.map(o => o.decode()))
    const reachable = o => { // does scrolling inside the page bring the right edge of `o` into view?
        for (let p = o.parentElement; p; p = p.parentElement) if (getComputedStyle(p).overflowX=='auto') p.scrollLeft = 1e6
        return o.getBoundingClientRect().right <= wide+1 }
    const longest = o => o.textContent.split('\\n').sort((a,b) => b.length-a.length)[0]
    return {
        scrolls: document.documentElement.scrollWidth > wide,
        images:  images.filter(o => !o.naturalWidth || !o.alt.trim()).map(o => o.src),
        tables:  [...article.querySelectorAll('table')].filter(o => !reachable(o)).map(o => o.textContent.slice(0, 60)),
        code:    [...article.querySelectorAll('.highlight:not(.output) pre > code')].filter(o => o.scrollWidth > o.clientWidth+1).map(longest),
        others:  [...article.querySelectorAll('*')].filter(o => ['auto', 'scroll'].includes(getComputedStyle(o).overflowX) &&
                     o.scrollWidth > o.clientWidth+1 && !o.closest('.highlight:not(.prose)') && !o.closest('table') &&
                     !o.querySelector('table')).map(o => o.textContent.trim().slice(0, 60))} })()"""

widths = [390, 768, 1280, 1600]

@pytest.fixture(scope='module')
def looks(html, browser):
    "What `look` and the console say about each page, in windows of all `widths`"
    res = {}
    for page in html:
        browser.open(page)
        for width in widths[::-1]:
            browser.resize(width)
            res[page,width] = dict(browser.js(look), errors=browser.errors())
    return res

def refuse(bad, what):
    "Fail with a line for each page in `bad` that has something to say"
    if lines := [f'{page}: {o}' for page,o in bad.items() if o]: pytest.fail('\n  '.join([f'{what}:', *lines]), pytrace=False)

looked_for = dict(
    errors  = ([390],  'errors in the console'), # those of all widths
    images  = ([390],  'images that do not load or have no alternative text'),
    scrolls = (widths, 'pages that scroll sideways'),
    tables  = (widths, 'tables with a part that cannot be reached'),
    others  = (widths, 'what scrolls sideways in a page, and is neither code nor a table'),
    code    = ([1600], 'lines of code that are cut, where they should have at most 100 columns'))

@pytest.mark.parametrize('key', looked_for)
def test_look(key, looks):
    where,what = looked_for[key]
    refuse({k: v[key] for k,v in looks.items() if k[1] in where}, what)

def test_schemes(browser):
    "Colours, also those of plots, are what the system asks for until the button in the header changes them, also for the next page"
    def dark(): return browser.js("""[getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(o => o<50),
                                     getComputedStyle(document.querySelector('figure img')).filter.includes('invert')]""")
    for scheme in ('light', 'dark'):
        browser.new_tab()
        browser.open('loss_scale.html', scheme=scheme)
        assert dark()==[scheme=='dark']*2
    browser.js("document.querySelector('label[for=__palette_0]').click()")
    browser.wait("document.body.dataset.mdColorScheme=='default'")
    assert dark()==[False, False]
    browser.open('recorder.html', scheme='dark')
    assert dark()==[False, False]

def test_menu(browser):
    "On a narrow screen the menu is hidden, opens at the button, and leads to another page"
    browser.open('index.html', 400)
    left = "document.querySelector('.md-sidebar--primary').getBoundingClientRect().left"
    assert browser.js(left)<0
    browser.js("document.querySelector('.md-header label[for=__drawer]').click()")
    browser.wait(f'{left}>=0')
    assert not browser.js('document.documentElement.scrollWidth > innerWidth')
    assert browser.errors()==[]
    browser.events = []
    browser.js("[...document.querySelectorAll('.md-sidebar--primary a')].find(o => o.href.endsWith('/keep.html')).click()")
    browser.loaded() # while it leaves a page, Chromium answers no question
    assert browser.js('location.pathname').endswith('howto/keep.html') and browser.errors()==[]

@pytest.mark.parametrize('words,page', [('migrate', 'howto/migrate'), ('nan', 'howto/troubleshooting'), ('Lightning', 'howto/from_other_libraries'),
    ('gradient accumulation', 'howto/accumulation_and_clipping'), ('fine_tune', ''),
    *[(o, 'explanations/training_step') for o in ('inference', 'predict', 'how does it work', 'mixed precision explained')], ('loss scale', 'loss_scale'),
    ('memory', 'howto/less_memory'), ('benchmark', 'tutorials/measure'), ('Trainer', 'howto/other_trainers'), ('rescue', 'callback'),
    ('fp8', 'fp8'), ('thread', 'half')])
def test_search(words, page, browser):
    "The first ten results have the page that answers"
    browser.open('index.html')
    browser.js("document.querySelector('.md-search__button').click()")
    found = "[...[...document.querySelectorAll('*')].find(o => o.shadowRoot).shadowRoot.querySelectorAll('ol a')].map(o => o.href)"
    browser.wait("document.activeElement.shadowRoot?.activeElement?.tagName=='INPUT'")
    browser.call('Input.insertText', text=words)
    res = browser.wait(f'(o => o.length && o)({found})')
    assert any(page in o for o in res), res
    assert browser.errors()==[]

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
