"`python -m mp_callbacks`: try every precision on this machine"
import sys

from .demo import main

if __name__=='__main__': sys.exit(main())
