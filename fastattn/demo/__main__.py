import sys

from fastattn.demo import main

sys.exit(main())
