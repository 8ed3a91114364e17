"""Wheels by version and sha256; written by `./bazelw run //third_party/pypi:refresh`."""

# name: (version, {file name: sha256})
WHEELS = {
    "abi3audit": ("0.0.26", {
        "abi3audit-0.0.26-py3-none-any.whl": "b94b774984e50ec03481c1dda88c48079f6baec870b263bf7f5e7415feb8802d",
    }),
    "abi3info": ("2026.9.25", {
        "abi3info-2026.9.25-py3-none-any.whl": "d5cbf46f358a4e0cafa171572adb67e5dce14a1b316e3c9f577234dbafcd5214",
    }),
    "absl-py": ("2.5.1", {
        "absl_py-2.5.1-py3-none-any.whl": "721200f2f0e9960f2ca9dc3a2a706b201f5f75d812c158f059cbbe29eeafbdb8",
    }),
    "accelerate": ("1.15.0", {
        "accelerate-1.15.0-py3-none-any.whl": "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec",
    }),
    "annotated-doc": ("0.0.7", {
        "annotated_doc-0.0.7-py3-none-any.whl": "6bc31bbbec6dfaaedc1676dbc11dbda96fe22a2b5c400e9ebad113fec44a9dc6",
    }),
    "anyio": ("4.16.0", {
        "anyio-4.16.0-py3-none-any.whl": "c66ae634e0b8228396b801741beb3294326d4b6102f7bba4041c0dfb58c29026",
    }),
    "ast-serialize": ("0.13.1", {
        "ast_serialize-0.13.1-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": "9f99786e0d62082a5b121b3437f3167562133711df22128de1e9886f57f0b226",
    }),
    "attrs": ("26.1.0", {
        "attrs-26.1.0-py3-none-any.whl": "c647aa4a12dfbad9333ca4e71fe62ddc36f4e63b2d260a37a8b83d2f043ac309",
    }),
    "auditwheel": ("6.8.2", {
        "auditwheel-6.8.2-py3-none-any.whl": "05fd2dd4b743217cd5f66066adc95b03a079424b1f0a878ad1e40fe2cdea4704",
    }),
    "beartype": ("0.23.1", {
        "beartype-0.23.1-py3-none-any.whl": "4461b4dc57e3fdd6c8a8464b22cf118002eea107c33e9fef651c69068ab3cce3",
    }),
    "boolean-py": ("5.0", {
        "boolean_py-5.0-py3-none-any.whl": "ef28a70bd43115208441b53a045d1549e2f0ec6e3d08a9d142cbc41c1938e8d9",
    }),
    "cattrs": ("26.2.1", {
        "cattrs-26.2.1-py3-none-any.whl": "a12aaa3453dc8f633a815293179f08b7421ed18d2575c459c3c736f840beac24",
    }),
    "certifi": ("2026.10.19.post1", {
        "certifi-2026.10.19.post1-py3-none-any.whl": "1324c476b4811eff41a8bc2122cd0bbd4d9c7234c725446d99ab1612b3a7fdd2",
    }),
    "charset-normalizer": ("3.5.3", {
        "charset_normalizer-3.5.3-cp311-cp311-manylinux1_x86_64.manylinux_2_28_x86_64.manylinux_2_5_x86_64.whl": "2a6f937e0b70133d1f826d0a253331b6fe1a4c874808cc12e16f2fb8177042f4",
    }),
    "clang-format": ("23.1.5", {
        "clang_format-23.1.5-py2.py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "d97ce49911ba8c89ef3f3c0735a9c7818e4780ab4812c67d1c5fcd829d16ae52",
    }),
    "click": ("8.5.1", {
        "click-8.5.1-py3-none-any.whl": "8bb5376d2006950386f8c6427613334a2acadc5f559cb80e638d00b4df957e37",
    }),
    "contourpy": ("1.3.3", {
        "contourpy-1.3.3-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "51e79c1f7470158e838808d4a996fa9bac72c498e93d8ebe5119bc1e6becb0db",
    }),
    "cuda-bindings": ("13.0.3", {
        "cuda_bindings-13.0.3-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl": "9afede5937474864aa794eb57399dbdf5d2b05427aadcac275209b0857528a61",
    }),
    "cuda-pathfinder": ("1.9.1", {
        "cuda_pathfinder-1.9.1-py3-none-any.whl": "b743c132f90ad2d1e71d43fd28f31ebcde518f943e50fd44aca62b2a80d5230d",
    }),
    "cycler": ("0.12.1", {
        "cycler-0.12.1-py3-none-any.whl": "85cef7cff222d8644161529808465972e51340599459b8ac3ccbac5a854e0d30",
    }),
    "filelock": ("4.2.12", {
        "filelock-4.2.12-py3-none-any.whl": "21decfec02f116ed4c954433cdb31f28c3b346b784543177b6d7059da2702ee9",
    }),
    "fonttools": ("4.68.0", {
        "fonttools-4.68.0-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "4b9c89b5876f1a74b1341632dfaf4c4c2be565d76c060445df401ebe7a4ceefa",
    }),
    "fsspec": ("2026.9.0", {
        "fsspec-2026.9.0-py3-none-any.whl": "8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f",
    }),
    "grimp": ("3.19", {
        "grimp-3.19-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "2f5c9d0ed032e686da9bef72db3657975ea07c5c0be31e6b2c2fe02d7e6ef9f1",
    }),
    "h11": ("0.16.0", {
        "h11-0.16.0-py3-none-any.whl": "63cf8bbe7522de3bf65932fda1d9c2772064ffb3dae62d55932da54b31cb6c86",
    }),
    "hf-xet": ("1.8.0", {
        "hf_xet-1.8.0-cp38-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "29dab7c904cd1914a0439c6e1306c12c7497c8bd32290fbe563ebf51ca4b6d6d",
    }),
    "httpcore2": ("2.16.2", {
        "httpcore2-2.16.2-py3-none-any.whl": "16051ae2a42f776007543f32de9349a317b23d2cbb4e1456b4bac0e88b87419a",
    }),
    "httpx2": ("2.16.2", {
        "httpx2-2.16.2-py3-none-any.whl": "f05c13aade4c45dbf1c9060647a1058f0acad62398fad96e741269edb33d46f5",
    }),
    "huggingface-hub": ("2.4.0", {
        "huggingface_hub-2.4.0-py3-none-any.whl": "42ecfd93ede47bdd333daebbf66a32d7bfe2e18752754fe4d2d4f98a0179d801",
    }),
    "hypothesis": ("6.170.15", {
        "hypothesis-6.170.15-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "ecbd6294a636594580689debc3011a0ca3eb76577770f661224314202f107e14",
    }),
    "idna": ("3.20", {
        "idna-3.20-py3-none-any.whl": "ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c",
    }),
    "import-linter": ("2.16", {
        "import_linter-2.16-py3-none-any.whl": "e775602e9214ab3933fc7d2162278ea1f11dd9229c914735c1bda43b94619565",
    }),
    "iniconfig": ("2.3.1", {
        "iniconfig-2.3.1-py3-none-any.whl": "9121e2c1fdb355232495be3194c8dfe87ccc2d5dee45947b78e68f499790d7a7",
    }),
    "jinja2": ("3.1.6", {
        "jinja2-3.1.6-py3-none-any.whl": "85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67",
    }),
    "kaitaistruct": ("0.11", {
        "kaitaistruct-0.11-py2.py3-none-any.whl": "5c6ce79177b4e193a577ecd359e26516d1d6d000a0bffd6e1010f2a46a62a561",
    }),
    "kiwisolver": ("1.5.1", {
        "kiwisolver-1.5.1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "95a02752aa032eef4aed01cda6d9b687c669bd0396bf4519eef8bba22a286720",
    }),
    "librt": ("0.17.0", {
        "librt-0.17.0-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl": "598c5455f07fc182a926b88e63776c49dc4cf47465c998cbc6ba1f010b875b51",
    }),
    "license-expression": ("30.4.4", {
        "license_expression-30.4.4-py3-none-any.whl": "421788fdcadb41f049d2dc934ce666626265aeccefddd25e162a26f23bcbf8a4",
    }),
    "markdown-it-py": ("4.3.0", {
        "markdown_it_py-4.3.0-py3-none-any.whl": "7aa1511a46c39138de78d9eba92ce47e63124d8003fc98b3a351909e04239efa",
    }),
    "markupsafe": ("3.0.4", {
        "markupsafe-3.0.4-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl": "6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808",
    }),
    "matplotlib": ("3.11.2", {
        "matplotlib-3.11.2-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "07d9b9fa60cd4c393692f50d0bb03123242ddf61c99bb0e95e75feb354e7c1a8",
    }),
    "mdurl": ("0.1.2", {
        "mdurl-0.1.2-py3-none-any.whl": "84008a41e51615a49fc9966191ff91509e3c40b939176e643fd50a5c2196b8f8",
    }),
    "mpmath": ("1.3.0", {
        "mpmath-1.3.0-py3-none-any.whl": "a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c",
    }),
    "mypy": ("2.4.1", {
        "mypy-2.4.1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl": "b69a15fc2e75858d6b15e91ed3a0dcff1a533265183b64734138791fe0f49aa5",
    }),
    "mypy-extensions": ("1.2.0", {
        "mypy_extensions-1.2.0-py3-none-any.whl": "993e7a20aa5671eb41a7132cf555af30062da99729601601b9a8382b11cae768",
    }),
    "nanobind": ("3.1.0", {
        "nanobind-3.1.0-py3-none-any.whl": "96984dbe8154ffb86e653b1b60aaeed6985c710c5e75ad0279eb87943c66292d",
    }),
    "networkx": ("3.6.1", {
        "networkx-3.6.1-py3-none-any.whl": "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
    }),
    "numpy": ("2.4.6", {
        "numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93",
    }),
    "nvidia-cuda-cccl": ("13.0.85", {
        "nvidia_cuda_cccl-13.0.85-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
    }),
    "nvidia-cuda-crt": ("13.0.88", {
        "nvidia_cuda_crt-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
    }),
    "nvidia-cuda-nvcc": ("13.0.88", {
        "nvidia_cuda_nvcc-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    }),
    "nvidia-cuda-nvrtc": ("13.0.88", {
        "nvidia_cuda_nvrtc-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl": "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
    }),
    "nvidia-cuda-runtime": ("13.0.96", {
        "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    }),
    "nvidia-cutlass": ("4.2.0.0", {
        "nvidia_cutlass-4.2.0.0-py3-none-any.whl": "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6",
    }),
    "nvidia-ml-py": ("13.615.71", {
        "nvidia_ml_py-13.615.71-py3-none-any.whl": "959bf4adf6fe1308e4bd739e722236b0d1ec8392e2cefad33ff70c311380b9b6",
    }),
    "nvidia-nvjitlink": ("13.0.88", {
        "nvidia_nvjitlink-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl": "13a74f429e23b921c1109976abefacc69835f2f433ebd323d3946e11d804e47b",
    }),
    "nvidia-nvvm": ("13.0.88", {
        "nvidia_nvvm-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl": "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
    }),
    "packaging": ("26.3", {
        "packaging-26.3-py3-none-any.whl": "d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c",
    }),
    "pathspec": ("1.1.1", {
        "pathspec-1.1.1-py3-none-any.whl": "a00ce642f577bf7f473932318056212bc4f8bfdf53128c78bbd5af0b9b20b189",
    }),
    "pefile": ("2024.8.26", {
        "pefile-2024.8.26-py3-none-any.whl": "76f8b485dcd3b1bb8166f1128d395fa3d87af26360c2358fb75b80019b957c6f",
    }),
    "pillow": ("13.0.0", {
        "pillow-13.0.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "a625df9a2a5597fa5e5266e01aefc82604bb85d291e3547981e863560d75da6c",
    }),
    "platformdirs": ("4.14.8", {
        "platformdirs-4.14.8-py3-none-any.whl": "1e34af590de4d978631b751eb2202f2fee4497537a17c1720b12fcf57b331392",
    }),
    "pluggy": ("1.7.0", {
        "pluggy-1.7.0-py3-none-any.whl": "7dd7b0d8832ba3cb632c306926ded123429211b83641b35dc5c41ad2d34f9bec",
    }),
    "ply": ("3.11", {
        "ply-3.11-py2.py3-none-any.whl": "096f9b8350b65ebd2fd1346b12452efe5b9607f7482813ffca50c22722a807ce",
    }),
    "psutil": ("7.2.2", {
        "psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.manylinux_2_12_x86_64.manylinux_2_28_x86_64.whl": "076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9",
    }),
    "pyelftools": ("0.33", {
        "pyelftools-0.33-py3-none-any.whl": "f215ad5f47d3f1373a21496a6c9e0707c622840d0622f23ff7ce08678b020036",
    }),
    "pygments": ("2.21.0", {
        "pygments-2.21.0-py3-none-any.whl": "2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9",
    }),
    "pyparsing": ("3.3.3", {
        "pyparsing-3.3.3-py3-none-any.whl": "ece8c00a69cf01b45d0b1dedabb469c90d8caf996d4fda40f147627a122849a4",
    }),
    "pytest": ("9.2.0", {
        "pytest-9.2.0-py3-none-any.whl": "07acdcf88ec174f907dc01af70bf52d49b014bbab03faeeade31c96b18c2e588",
    }),
    "python-dateutil": ("4.0.0", {
        "python_dateutil-4.0.0-py3-none-any.whl": "a5e246f79eb80475e691bf93862cead98decd8a498cf53ba0516fcdc0f50dc1c",
    }),
    "pyyaml": ("6.0.4", {
        "pyyaml-6.0.4-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl": "622aa875fa6533f25fedcffe23079357d65a690d462200afed5d8e9d0e01ebee",
    }),
    "rdflib": ("7.6.0", {
        "rdflib-7.6.0-py3-none-any.whl": "30c0a3ebf4c0e09215f066be7246794b6492e054e782d7ac2a34c9f70a15e0dd",
    }),
    "regex": ("2026.11.19", {
        "regex-2026.11.19-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl": "86d3b2ea69b3c56df3e8ddbac6cd98eaf5a8c5b5e7e006897ebdf7a28d6818e6",
    }),
    "requests": ("2.34.2", {
        "requests-2.34.2-py3-none-any.whl": "2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0",
    }),
    "requests-cache": ("1.3.3", {
        "requests_cache-1.3.3-py3-none-any.whl": "c8df20ff874ebfc026959e3874e6c12bd6724934cdb10925915908453d4b17e4",
    }),
    "rich": ("15.0.0", {
        "rich-15.0.0-py3-none-any.whl": "33bd4ef74232fb73fe9279a257718407f169c09b78a87ad3d296f548e27de0bb",
    }),
    "ruff": ("0.17.6", {
        "ruff-0.17.6-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": "aa3b08254a732acba246891089a152c47c5733dc36b8ecb76ce8602f8326e5e4",
    }),
    "safetensors": ("0.8.0", {
        "safetensors-0.8.0-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": "fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774",
    }),
    "semantic-version": ("2.10.0", {
        "semantic_version-2.10.0-py2.py3-none-any.whl": "de78a3b8e0feda74cabc54aab2da702113e33ac9d9eb9d2389bcf1f58b7d9177",
    }),
    "setuptools": ("84.2.1", {
        "setuptools-84.2.1-py3-none-any.whl": "ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2",
    }),
    "shellingham": ("1.5.4", {
        "shellingham-1.5.4-py2.py3-none-any.whl": "7ecfff8f2fd72616f7481040475a65b2bf8af90a56c89140852d1120324e8686",
    }),
    "sortedcontainers": ("2.4.0", {
        "sortedcontainers-2.4.0-py2.py3-none-any.whl": "a163dcaede0f1c021485e957a39245190e74249897e2ae4b2aa38595db237ee0",
    }),
    "spdx-tools": ("0.8.5", {
        "spdx_tools-0.8.5-py3-none-any.whl": "7c2d5865941be9d2e898f5b084e8d5422dd298dc5a29320ddb198fec304f59c4",
    }),
    "sympy": ("1.14.0", {
        "sympy-1.14.0-py3-none-any.whl": "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
    }),
    "tokenizers": ("0.23.3", {
        "tokenizers-0.23.3-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": "376851d22bcf9d650a5c3090bb83e6cf9e895fbf0595369fa4cd43c1f69b5f87",
    }),
    "torch": ("2.13.0+cpu", {
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    }),
    "tqdm": ("4.70.1", {
        "tqdm-4.70.1-py3-none-any.whl": "c293e525e6fef9c20e8728fd4612df02a0aa31bb5fe91ecd93e123b1b7bffa73",
    }),
    "transformers": ("5.24.0", {
        "transformers-5.24.0-py3-none-any.whl": "ff5ebedf9359f94bb63772b6380eba6e7104d010cbbb2cb82c788817ea7486f6",
    }),
    "triton": ("3.6.0", {
        "triton-3.6.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "e8e323d608e3a9bfcc2d9efcc90ceefb764a82b99dea12a86d643c72539ad5d3",
        "triton-3.6.0-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "74caf5e34b66d9f3a429af689c1c7128daba1d8208df60e81106b115c00d6fca",
        "triton-3.6.0-cp313-cp313-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "10c7f76c6e72d2ef08df639e3d0d30729112f47a56b0c81672edc05ee5116ac9",
    }),
    "truststore": ("0.10.5", {
        "truststore-0.10.5-py3-none-any.whl": "9aaaedaefaf06d8b206278cf8b5012bc897f485a874503501e12d776df78951c",
    }),
    "typer": ("0.28.0", {
        "typer-0.28.0-py3-none-any.whl": "afd18929180b706c5e9a239f53c3c8136903553c0c2d460598bbaa924191d4ab",
    }),
    "typing-extensions": ("4.16.0", {
        "typing_extensions-4.16.0-py3-none-any.whl": "481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8",
    }),
    "tzdata": ("2026.6", {
        "tzdata-2026.6-py2.py3-none-any.whl": "0a10eec6e13ef16b627fabed9a5f2ba61a62b1c67f327305f4e7e412a70b4aec",
    }),
    "uritools": ("6.1.5", {
        "uritools-6.1.5-py3-none-any.whl": "6cc6b29458d7df933c8fcebafe766442265742875c339711986c8f6d639f8909",
    }),
    "url-normalize": ("3.1.0", {
        "url_normalize-3.1.0-py3-none-any.whl": "34c386c6b2dbde760eaaaa8542dc29995c75f2baf94acceee18e5b6b29579469",
    }),
    "urllib3": ("2.8.0", {
        "urllib3-2.8.0-py3-none-any.whl": "0cf3cae568d36aa9576b28dfb35f11328f1cb974ca7647d9475ebb86c75ac6e3",
    }),
    "waitress": ("3.0.2", {
        "waitress-3.0.2-py3-none-any.whl": "c56d67fd6e87c2ee598b76abdd4e96cfad1f24cacdea5078d382b1f9d7b5ed2e",
    }),
    "wheel": ("0.48.0", {
        "wheel-0.48.0-py3-none-any.whl": "3217dcc807155e45db462d7ef2431f5ddda0d7273b700d05a67b271ceb1287ab",
    }),
    "xmltodict": ("1.0.4", {
        "xmltodict-1.0.4-py3-none-any.whl": "a4a00d300b0e1c59fc2bfccb53d7b2e88c32f200df138a0dd2229f842497026a",
    }),
    "ziglang": ("0.13.0", {
        "ziglang-0.13.0-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl": "3ce0c9f16547e5d61b32e0d226926e9a2552ef4b91fccf7ab5ea1a623a77824b",
    }),
}
