"""Does a test fail where a promise breaks? This breaks ten promises on purpose, each in two ways or more, in a copy

    python tests/mutations.py [NAME...]

NAME is a part of a promise's name, as in `python tests/mutations.py scale ddp`; without one it tries all. It prints
what was broken and which test has found it. The exit code is 1 if no test found a break, or if a test fails in the
copy as it is. The table is outdated where the text to replace isn't found exactly once: mend it as the code changes.
Each break runs tests in a process of its own, so that all of them take some minutes."""
import os,re,subprocess,sys
from pathlib import Path
from shutil import copytree,ignore_patterns
from tempfile import TemporaryDirectory
from typing import NamedTuple

root = Path(__file__).resolve().parent.parent

class Break(NamedTuple):
    "One way to break a promise"
    what:str # In words
    file:str # In `mp_callbacks`
    old:str # Text that is found in it once
    new:str # Text in its place
    test:str # In `tests`: the test that has to fail

rounded = '''finally:
            for p in self.steps.opt_params(): p.data = p.data.to(self.half_dtype).float()
            write_state(opt, numbers)'''

promises = {
    'a skipped step leaves no trace': [
        Break('batch norm keeps what a skipped step has written', 'training_steps.py',
              'restore_buffers(self.buffers)', 'pass',
              'test_windows.py::test_overflow_in_a_window'),
        Break('its loss counts in the training loss that is shown', 'inside.py', 'if not skipped: return', 'return',
              'test_recorder.py::test_log')],
    'gradients are unscaled at every event': [
        Break('gradients of earlier batches are not scaled again', 'training_steps.py',
              'mul_grads(params, scale)', 'pass',
              'test_parity.py::test_accumulation'),
        Break('those of tensors that belong to nobody keep the scale', 'training_steps.py',
              '[] if beside is None else reached_leaves(loss, beside)', '[]', 'test_loss.py::test_tensors_of_nobody')],
    'the loss is computed in float32': [
        Break('predictions stay in half precision', 'half.py',
              'return as_float32(res)', 'return res',
              'test_inputs.py::test_loss_in_float32'),
        Break('predictions in dataclasses do', 'dtypes.py', "if hasattr(tree, '__dataclass_fields__')", 'if False',
              'test_inputs.py::test_structures')],
    'the scale: floor, growth, resume': [
        Break('it falls below its floor', 'loss_scale.py', 'if s>=low: return s', 'return s',
              'test_overflow.py::test_random_sequences'),
        Break('a checkpoint has no count of finite steps, so it grows too late', 'loss_scale.py',
              "state_fields = 'loss_scale','counter',", "state_fields = 'loss_scale',",
              'test_resume.py::test_stopped_at_each_step')],
    'masters are float32': [
        Break('weights have no more bits than half precision', 'precision.py', 'finally: write_state(opt, numbers)',
              rounded, 'test_parity.py::test_tiny_updates'),
        Break('what forward rounds for good stays so', 'precision.py',
              'check_float32(self.learn.model, self.steps.step.full)', 'pass',
              'test_silent.py::test_rounded_parameter')],
    'interrupts': [
        Break('the model still computes in half precision', 'training_steps.py',
              '(half.install if on else half.remove)()\n        if steps.chosen', 'if steps.chosen',
              'test_signals.py::test_interrupt'),
        Break('a step that was begun goes on', 'training_steps.py',
              'if training and steps.step is not None and not steps.step.outcome: steps.drop_step()', '',
              'test_windows.py::test_error_leaves_no_gradients')],
    'one sync per step': [
        Break('losses are waited for by themselves', 'grads.py', '_numbers([values,others,losses[:-1],losses[-1:]])',
              '[*_numbers([values,others]),*_numbers([losses[:-1],losses[-1:]])]', 'test_syncs.py'),
        Break("fastai's recorder waits for the loss", 'precision.py', 'hand_over_loss(learn, stats.loss)', 'pass',
              'test_syncs.py'),
        Break('each step looks for the largest gradient', 'training_steps.py', 'scaling.wants_amax,\n',
              'True,\n', 'test_syncs.py')],
    'DDP agrees': [
        Break('each process begins with the scale of its own', 'precision.py',
              'torch.distributed.broadcast_object_list(numbers, group=group, group_src=0)', 'pass',
              'test_distributed.py::test_ranks_are_equal'),
        Break('a layer that a batch leaves out is trained with zeros', 'cast.py',
              '''self._used[call.graph]:
            states = [(o,state) for o in node if call.graph not in o.in_vain and (state := o.state())]''',
              '''self._nodes:
            states = [(o,state) for o in node if (state := o.state())]''', 'test_cast.py::test_ddp_unused'),
        Break('gradients are sent when all of them are there', 'cast.py', 'ctx._set_sequence_nr(2**62)', 'pass',
              'test_cast.py::test_ddp_sends_early')],
    'keep': [
        Break('what is inside a kept module computes in half precision', 'ways.py', 'if roots & parents:',
              'if name in roots:', 'test_policy.py::test_rule_is_keep'),
        Break('autocast stays on in kept modules', 'ways.py',
              'torch.autocast(half.device_type, enabled=False)', 'torch.enable_grad()',
              'test_half.py::test_keep')],
    'checkpoints': [
        Break('which modules were rescued is not read', 'training_steps.py', '**counts, rescued=rescued)', '**counts)',
              'test_rescue.py::test_resumed'),
        Break("a file's scale may be out of this learner's bounds", 'loss_scale.py',
              "min(max(d['loss_scale'], self.min_loss_scale), self.max_loss_scale)", "d['loss_scale']",
              'test_resume.py::test_kept_within_bounds')]}

def copied(path):
    "Copy to `path` what tests need: the package, the tests, and the pages that they read"
    for o in ('mp_callbacks','tests','nbs','bench','examples'):
        copytree(root/o, path/o, ignore=ignore_patterns('__pycache__', 'results'))
    for o in ('pyproject.toml','settings.ini'): (path/o).write_bytes((root/o).read_bytes())

def first_failure(path, tests):
    "The first of `tests` that fails in the copy at `path`, or None"
    run = subprocess.run([sys.executable, '-m', 'pytest', '-x', '-q', '-rf', '--tb=no', '-p', 'no:cacheprovider',
                          *[f'tests/{o}' for o in tests]], cwd=path, env=dict(os.environ, PYTHONPATH=str(path)),
                         text=True, stdout=subprocess.PIPE)
    if run.returncode==0: return None
    found = re.search(r'^FAILED tests/(\S+)', run.stdout, re.MULTILINE)
    return found[1] if found else sys.exit(f'{tests}: these tests could not be run\n{run.stdout}')

def tried(path, o):
    "Which test fails with the break `o`"
    file = path/'mp_callbacks'/o.file
    code = file.read_text(encoding='utf-8')
    file.write_text(code.replace(o.old, o.new), encoding='utf-8')
    try: return first_failure(path, [o.test])
    finally: file.write_text(code, encoding='utf-8')

def main(names):
    chosen = {k:v for k,v in promises.items() if not names or any(o.lower() in k.lower() for o in names)}
    if not chosen: sys.exit(f'No promise has {names} in its name: {", ".join(promises)}')
    breaks = [o for v in chosen.values() for o in v]
    for o in breaks:
        n = (root/'mp_callbacks'/o.file).read_text(encoding='utf-8').count(o.old)
        if n!=1: sys.exit(f'The table is outdated: {o.file} has {n} times, and not once: {o.old}')
    missed = 0
    with TemporaryDirectory() as tmp:
        path = Path(tmp)
        copied(path)
        if found := first_failure(path, {o.test for o in breaks}): sys.exit(f'{found} fails in the copy as it is')
        for promise,each in chosen.items():
            for o in each:
                found = tried(path, o)
                missed += found is None
                print(f'{promise:40}{o.what:65}{found or "NOT FOUND"}', flush=True)
    print(f'{len(breaks)-missed} of {len(breaks)} were found')
    return bool(missed)

if __name__=='__main__': sys.exit(main(sys.argv[1:]))
