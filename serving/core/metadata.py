"""Request metadata keys, equal on every door (gRPC metadata, HTTP headers)."""

TENANT = "x-eldr-tenant"
SLO_CLASS = "x-eldr-slo-class"
PRODUCT = "x-eldr-product"
DEADLINE_MS = "x-eldr-deadline-ms"
SESSION = "x-eldr-session"
MODEL = "x-eldr-model"
# "allow" or "never": whether a request may be re-run from the tokens so far after a loss.
RESTART = "x-eldr-restart"
# Callers with different salts never share cached prefixes.
CACHE_SALT = "x-eldr-cache-salt"

ALL = (TENANT, SLO_CLASS, PRODUCT, DEADLINE_MS, SESSION, MODEL, RESTART, CACHE_SALT)
