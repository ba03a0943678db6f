"`python -m mp_callbacks`: try every precision on this machine"
import sys,warnings

try:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # what other libraries warn of when they are imported
        from .demo import main
    if __name__=='__main__': sys.exit(main())
except KeyboardInterrupt:
    print('\nInterrupted', file=sys.stderr)
    sys.exit(130)
