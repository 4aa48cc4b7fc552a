"""Packaging of mindformers_ext. Every dependency says why it is there."""

from setuptools import find_packages, setup

setup(
    name="mindformers_ext",
    version="0.1.0",
    description="A PyNative Trainer for MindSpore whose YAML can say run_mode: predict",
    license="Apache-2.0",
    packages=find_packages(include=["mindformers_ext", "mindformers_ext.*"]),
    package_data={"mindformers_ext": ["py.typed"], "mindformers_ext.ops.native": ["*.cpp", "*.h"]},
    python_requires=">=3.10,<3.13",  # the versions that MindSpore has wheels for
    install_requires=[
        "mindspore>=2.10,<2.12",  # tensors, autograd, communication: the releases this code was written for
        "numpy>=1.26,<2",  # host side of sampling and checkpoints; MindSpore 2.10 breaks on numpy 2
        "pyyaml>=6",  # the YAML of a job
        "safetensors>=0.4",  # weights on disk, in HF and in MindFormers folders
        "tokenizers>=0.15",  # text to token ids and back, from tokenizer.json
        "jinja2>=3.1.6,<4",  # prompt and chat templates, in its sandbox; older ones have known ways out of it
        "tqdm>=4.60",  # the progress bar of prediction
    ],
    extras_require={
        "test": [
            "pytest>=9",  # runs the suite
            "pytest-timeout>=2.3",  # a hanging test fails instead of holding the suite up
            "pytest-xdist>=3.5",  # unit tests on all cores
            "hypothesis>=6.100",  # property tests of files and layouts
            "ruff>=0.6",  # lint and format
            "mypy>=1.11",  # types
            "types-PyYAML>=6",  # stubs for mypy
            "types-tqdm>=4.60",  # stubs for mypy
        ],
        # MindSpore Transformers itself, never imported here at import time. Its release 2.1 asks for packages that PyPI
        # does not have on every platform (hyper-parallel), so this extra works where those are installed.
        "mindformers": ["mindformers>=2.1,<3"],
    },
)
