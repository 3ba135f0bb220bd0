"""Builds that are asked for over HTTP: written down as files, run in a process of their own.

settings.py             who runs them, and where corpora may lie
errors.py places.py     what may not be asked for, and why
records.py              HIVLP_HOME/builds: one folder a build, which every process reads alike
child.py execution.py   the process of one build; from its start to what came of it
builds.py local.py      the part of a serving process: one of them runs builds, or
queue.py worker.py      feeds a queue in Redis, which `hivlp worker` works off
cli.py                  that command
metrics.py              builds counted
"""
