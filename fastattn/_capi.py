"""Where code that was compiled with ``fastattn.h`` looks for the C entry, the capsule `attention`."""

from fastattn._api.c_entry import __getattr__ as __getattr__
