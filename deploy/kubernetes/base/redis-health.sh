#!/bin/sh
REDISCLI_AUTH="$REDIS_PASSWORD" valkey-cli --tls --cacert /certs/ca.pem ping | grep -q PONG
