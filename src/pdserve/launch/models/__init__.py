"""The places a model can come from, one module each; pdserve.launch.model chooses among them.

None of them knows the command line or how progress is drawn. The heavy libraries that they need are imported where they
are used, so that pdserve imports without any of them.
"""
