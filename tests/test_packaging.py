"What gets published: the files in wheel and sdist and their metadata; and each fact about the project has one source"
import shutil,tarfile,yaml,zipfile
from configparser import ConfigParser
from email.parser import HeaderParser

import mp_callbacks
from learners import *
from packaging.requirements import Requirement

try: import tomllib
except ImportError: import tomli as tomllib # Python 3.10

package = root/'mp_callbacks'
ini = ConfigParser(interpolation=None)
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']

def lines(key): return cfg[key].strip().splitlines()

@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "Wheel and sdist, built as `python -m build` does, but with the setuptools that is installed"
    pytest.importorskip('build', reason='needs the dev extra')
    src,dist = tmp_path_factory.mktemp('src')/'src',tmp_path_factory.mktemp('dist')
    # Away from the checkout, where an old build/ would get into the wheel
    without = '.git .venv _proc _docs build dist *.egg-info __pycache__'.split()
    shutil.copytree(root, src, ignore=shutil.ignore_patterns(*without))
    cmd = [sys.executable, '-m', 'build', '--no-isolation', '--outdir', dist, src]
    subprocess.run(cmd, check=True, stdout=subprocess.DEVNULL)
    return next(dist.glob('*.whl')),next(dist.glob('*.tar.gz'))

def test_files(built):
    "The package, the mark that it has types, and nothing else; and what is needed to build the wheel again"
    with zipfile.ZipFile(built[0]) as z: files = [o for o in z.namelist() if '.dist-info/' not in o]
    modules = [o.relative_to(root).as_posix() for o in package.rglob('*.py')]
    assert sorted(files)==sorted(['mp_callbacks/py.typed', *modules])
    with tarfile.open(built[1]) as t: files = {o.partition('/')[2] for o in t.getnames()}
    assert {'settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'mp_callbacks/__init__.py'} <= files
    assert not [o for o in files if o.startswith('tests')] # they would need the rest of the repository

def test_metadata(built):
    "That of the project; and requirements are those in settings.ini, each in its extra"
    with zipfile.ZipFile(built[0]) as z:
        metadata = HeaderParser().parsestr(z.read(next(o for o in z.namelist() if o.endswith('/METADATA'))).decode())
    assert metadata['Name']=='mp_callbacks'
    assert metadata['Version']==mp_callbacks.__version__
    assert metadata['License-Expression']==cfg['license'] and metadata['License-File']=='LICENSE'
    assert metadata['Requires-Python']==f">={cfg['pythons'].split()[0]}"
    assert metadata.get_payload()==(root/'README.md').read_text(encoding='utf-8')
    extras = 'distributed','test','dev','docs','peers'
    wanted = lines('requirements')+[f'{o}; extra=="{k}"' for k in extras for o in lines(f'{k}_requirements')]
    assert {Requirement(o) for o in metadata.get_all('Requires-Dist')}=={Requirement(o) for o in wanted}

def test_lower_bounds_are_those_tested():
    "tests/lower-bounds.txt, with which CI installs and runs all tests, is the lower bounds of settings.ini"
    text = (root/'tests/lower-bounds.txt').read_text(encoding='utf-8')
    tested = [o for o in text.splitlines() if not o.startswith('#')]
    bounds = [o for o in (*lines('requirements'),*lines('test_requirements')) if '>=' in o and '<' not in o]
    assert tested[:len(bounds)]==[o.partition(',')[0].replace('>=', '==') for o in bounds]
    workflow = (root/'.github/workflows/ci.yml').read_text(encoding='utf-8')
    assert {*re.findall(r'set: ([\w-]+)', workflow)}=={'lower-bounds','kaggle','colab'}
    pythons = cfg['pythons'].split()
    assert {pythons[0],pythons[-1]}<={*re.findall(r"python(?:-version)?: '([\d.]+)'", workflow)}<={*pythons}

@pytest.mark.parametrize('name', ['lower-bounds','kaggle','colab'])
def test_tested_versions(name):
    "They are within the bounds, and the table in CONTRIBUTING.md shows them"
    text = (root/f'tests/{name}.txt').read_text(encoding='utf-8')
    python,has = re.match(r'# Python ([\d.]+)', text)[1],dict(re.findall(r'^([\w-]+)==(.*)', text, re.M))
    for o in map(Requirement, lines('requirements')):
        assert has.get(o.name) is None or o.specifier.contains(has[o.name]), o
    row = f'| {python} | {has["fastai"]} | {has["fastcore"]} | {has["torch"]} |'
    assert f'[{name}.txt](tests/{name}.txt) {row}' in (root/'CONTRIBUTING.md').read_text(encoding='utf-8')
    assert python in cfg['pythons'].split()

def test_one_owner():
    "All addresses have the owner that pyproject.toml names, so that .ci/owner.py finds them"
    owner = re.match('https://github.com/([^/]+)/', project['urls']['Repository'])[1]
    found = set()
    patterns = 'nbs/**/*.ipynb','mp_callbacks/**/*.py','*.md','*.cff','pyproject.toml','.github/**/*'
    written = [o for pat in patterns for o in root.glob(pat) if o.is_file()]
    for o in written:
        text = o.read_text(encoding='utf-8')
        for o in (r'github(?:\.com)?/([\w-]+)/mp_callbacks', r'//([\w-]+)\.github\.io/mp_callbacks'):
            found |= {*re.findall(o, text)}
    assert found=={owner}

def test_citation():
    "It has author, version, licence and address of the project"
    cited = yaml.safe_load((root/'CITATION.cff').read_text(encoding='utf-8'))
    assert cited['authors']==[dict(name=cfg['author'])] and cited['license']==cfg['license']
    assert cited['version']==mp_callbacks.__version__ and cited['title']==project['name']
    assert (cited['repository-code'],cited['url'])==(project['urls']['Repository'],project['urls']['Documentation'])

def test_templates():
    "Forms and workflows are YAML with what GitHub needs, and the form for bugs asks for the checkup's text"
    folder = root/'.github'
    def _read(file): return yaml.safe_load(file.read_text(encoding='utf-8'))
    read = {o.relative_to(folder).as_posix(): _read(o) for o in folder.rglob('*.yml')}
    workflows = {k: v for k,v in read.items() if k.startswith('workflows/')}
    assert {*workflows}=={f'workflows/{o}.yml' for o in ('ci','site','release')}
    assert all({'name','permissions','jobs'}<={*o} for o in workflows.values())
    bug = read['ISSUE_TEMPLATE/bug.yml']
    assert {'name','description','body'}<={*bug} and 'precision_checkup()' in str(bug['body'])
    assert (folder/'pull_request_template.md').exists()
