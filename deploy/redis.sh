#!/bin/sh
# Starts the store. The password goes in through standard input: arguments can be listed by others.
set -eu
exec valkey-server - <<CONF
dir /data
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
requirepass $(cat /run/secrets/redis_password)
CONF
