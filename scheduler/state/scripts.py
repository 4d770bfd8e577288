"""The scripts that change what Redis keeps: each checks and writes in one step.

Two callers can never both win. The last key and the last argument of every script are those of
the fence: a scheduler writes under its term, and one whose term is over changes nothing.
"""

STALE = "STALE"
_FENCE = (
    "if (redis.call('GET', KEYS[#KEYS]) or '0') ~= ARGV[#ARGV] then\n"
    f"  return redis.error_reply('{STALE}')\n"
    "end\n"
)

SUBMIT = (
    _FENCE
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'status', ARGV[3], 'state', ARGV[4])
redis.call('RPUSH', KEYS[2], ARGV[1])
redis.call('RPUSH', KEYS[3], ARGV[1])
return 1
"""
)
UPDATE = (
    _FENCE
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return -1 end
if tonumber(state) >= tonumber(ARGV[4]) then return 0 end
if tonumber(ARGV[3]) < tonumber(state) then return -2 end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'state', ARGV[3])
if tonumber(ARGV[3]) ~= tonumber(ARGV[5]) then redis.call('LREM', KEYS[2], 0, ARGV[1]) end
return 1
"""
)
REQUEUE = (
    _FENCE
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return -1 end
if tonumber(state) >= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'state', ARGV[3])
redis.call('HDEL', KEYS[1], 'run')
redis.call('DEL', KEYS[3])
redis.call('LREM', KEYS[2], 0, ARGV[1])
redis.call('LPUSH', KEYS[2], ARGV[1])
return 1
"""
)
FORGET = (
    _FENCE
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if state and tonumber(state) < tonumber(ARGV[2]) then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('LREM', KEYS[4], 0, ARGV[1])
return 1
"""
)
SET_FIELD = _FENCE + "return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
DROP_FIELD = _FENCE + "return redis.call('HDEL', KEYS[1], ARGV[1])"
PUT_NODE = (
    _FENCE
    + """
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return redis.call('SADD', KEYS[2], ARGV[1])
"""
)
DROP_NODE = _FENCE + "redis.call('DEL', KEYS[1])\nreturn redis.call('SREM', KEYS[2], ARGV[1])"

# These two make and keep the term, so they stand outside the fence. A term is never smaller than
# the time, so that it grows even when Redis has lost its data: nodes remember the highest.
TAKE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local term = math.max(last + 1, tonumber(redis.call('TIME')[1]))
redis.call('SET', KEYS[2], string.format('%.0f', term))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return term
"""
RENEW = """
if (redis.call('GET', KEYS[2]) or '0') ~= ARGV[3] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
