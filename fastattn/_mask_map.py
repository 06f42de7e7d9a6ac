"""Where pickles of earlier releases look for the map of a `BlockMask`."""

from fastattn.masks.map import MaskMap as MaskMap
