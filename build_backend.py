"""The build backend: setuptools, plus what BW_AOT needs in the build environment to compile at install."""

import os

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings=None):
    requires = build_meta.get_requires_for_build_wheel(config_settings)
    return [*requires, "pybind11>=2.13", "ninja"] if os.environ.get("BW_AOT") else requires
