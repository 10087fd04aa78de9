B=/work/main/.venv/bin
[ -e tests/test_pages.py ] && { git mv tests/test_pages.py tests/test_written_pages.py; grep -rl "tests/test_pages.py" --include=*.md --include=*.py . | xargs sed -i 's#tests/test_pages.py#tests/test_written_pages.py#g'; }
sed -i '/^__version__ = /d' src/slipstream/base/log.py; printf '"""Errors, log, files, processes and the host: code that needs no other package of ours."""\n\n__version__ = "0.1.0"\n' > src/slipstream/base/__init__.py
sed -i 's/from slipstream.base.log import __version__/from slipstream.base import __version__/' src/slipstream/__init__.py src/slipstream/record/record_file.py; sed -i 's/slipstream.base.log.__version__/slipstream.base.__version__/' pyproject.toml
for x in 'params:The parameters of a request: sampling, pooling, structured outputs, adapters, processors.' 'contracts:Values that pass between scheduler, runner, engine and front end: numpy and plain structs.' 'checkpoint:Reads what the files of a model say. No torch, no options.'; do printf '"""%s"""\n' "${x#*:}" > src/slipstream/${x%%:*}/__init__.py; done
cp /tmp/fix/.importlinter .importlinter; cp /tmp/fix/test_imports.py tests/
