"""Features as colours: what the patches of a picture differ in most."""

from __future__ import annotations

import numpy as np

from fastattn.demo.image.attention import Floats

#: The percentiles of a component at which its colour is 0 and full. Few patches are beyond them.
DARKEST, BRIGHTEST = 1, 99


def component_colours(features: Floats, weights: Floats) -> tuple[Floats, float]:
    """The first three principal components of patches as red, green and blue, and what part they hold.

    Patches of the same colour have features of the same kind: parts of the same thing, wherever they are.

    Parameters
    ----------
    features : ndarray of shape ``(R, C, N)``
    weights : ndarray of shape ``(R, C)``
        How much each patch matters. A component and its negative are equally principal: taken is the one
        that is larger, and its colour brighter, where more weight is.

    Returns
    -------
    colours : ndarray of float32, shape ``(R, C, 3)``, from 0 to 1
    share : float, from 0 to 1
        The part of the features' variance that is the three components'.
    """
    rows = features.reshape(-1, features.shape[-1]).astype(np.float64)
    rows -= rows.mean(axis=0)
    variances, directions = np.linalg.eigh(rows.T @ rows)  # ascending
    components = rows @ directions[:, :-4:-1]
    components *= np.where(weights.ravel() @ components < 0, -1, 1)
    low, high = np.percentile(components, (DARKEST, BRIGHTEST), axis=0)
    tiny = np.finfo(np.float64).tiny  # where all patches are alike
    colours = np.clip((components - low) / np.maximum(high - low, tiny), 0, 1)
    share = float(variances[-3:].sum() / max(variances.sum(), tiny))
    return colours.reshape(*features.shape[:2], 3).astype(np.float32), share
