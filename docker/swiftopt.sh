#!/bin/sh
# What the containers run as `swiftopt`. A secret comes as a file: NAME_FILE names it, and NAME takes its content here, so
# that it stands in no image, compose file or `docker inspect`. It lies first on the path, so that `exec` and health
# checks get the secrets too. API keys need none of this: the server reads SWIFTOPT_API_KEYS_FILE itself.
set -eu
for name in PGPASSWORD SWIFTOPT_DATABASE_URL SWIFTOPT_REDIS_URL; do
    eval "file=\${${name}_FILE:-}"
    [ -n "$file" ] || continue
    if [ ! -r "$file" ]; then
        echo "error: ${name}_FILE names $file, which user $(id -u) cannot read: mount the file and make it readable" >&2
        exit 2
    fi
    value=$(cat "$file")
    export "$name=$value"
done
exec /opt/venv/bin/swiftopt "$@"
