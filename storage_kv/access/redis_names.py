"""Names of Redis' commands that do not exist here. Rules may name them, so that Redis' users files can be read.

Source: COMMAND LIST of Redis 7.0, and the additions of Redis 7.2 to 8.0 and Valkey 8.
"""

from typing import Final

_NAMES: Final = """
append asking bgrewriteaof bgsave bitcount bitfield bitfield_ro bitop bitpos blmove blmpop blpop brpop brpoplpush
bzmpop bzpopmax bzpopmin cluster copy debug decr decrby dump eval eval_ro evalsha evalsha_ro failover fcall fcall_ro
function geoadd geodist geohash geopos georadius georadius_ro georadiusbymember georadiusbymember_ro geosearch
geosearchstore getbit hdel hexists hget hgetall hincrby hincrbyfloat hkeys hlen hmget hmset hrandfield hscan hset
hsetnx hstrlen hvals incr incrby incrbyfloat lastsave latency lcs lindex linsert llen lmove lmpop lolwut lpop lpos
lpush lpushx lrange lrem lset ltrim memory migrate module monitor move object pfadd pfcount pfdebug pfmerge pfselftest
psubscribe psync publish pubsub punsubscribe randomkey readonly readwrite rename renamenx replconf replicaof restore
restore-asking role rpop rpoplpush rpush rpushx sadd save scard script sdiff sdiffstore setbit setrange shutdown
sinter sintercard sinterstore sismember slaveof slowlog smembers smismember smove sort sort_ro spop spublish
srandmember srem sscan ssubscribe subscribe sunion sunionstore sunsubscribe swapdb sync time unsubscribe wait xack
xadd xautoclaim xclaim xdel xgroup xinfo xlen xpending xrange xread xreadgroup xrevrange xsetid xtrim zadd zcard
zcount zdiff zdiffstore zincrby zinter zintercard zinterstore zlexcount zmpop zmscore zpopmax zpopmin zrandmember
zrange zrangebylex zrangebyscore zrangestore zrank zrem zremrangebylex zremrangebyrank zremrangebyscore zrevrange
zrevrangebylex zrevrangebyscore zrevrank zscan zscore zunion zunionstore

commandlog delifeq hexpire hexpireat hexpiretime hgetdel hgetex hpersist hpexpire hpexpireat hpexpiretime hpttl hsetex
httl waitaof
"""

_SUBCOMMANDS: Final = {
    "client": "caching getredir pause tracking trackinginfo unblock unpause capa import-source no-touch",
    "cluster": (
        "addslots addslotsrange bumpepoch count-failure-reports countkeysinslot delslots delslotsrange "
        "failover flushslots forget getkeysinslot help info keyslot links meet myid nodes replicas replicate "
        "reset saveconfig set-config-epoch setslot shards slaves slots myshardid slot-stats"
    ),
    "function": "delete dump flush help kill list load restore stats",
    "latency": "doctor graph help histogram history latest reset",
    "memory": "doctor help malloc-stats purge stats usage",
    "module": "help list load loadex unload",
    "object": "encoding freq help idletime refcount",
    "pubsub": "channels help numpat numsub shardchannels shardnumsub",
    "script": "debug exists flush help kill load show",
    "slowlog": "get help len reset",
    "xgroup": "create createconsumer delconsumer destroy help setid",
    "xinfo": "consumers groups help stream",
    "commandlog": "get help len reset",
}

ELSEWHERE: Final = frozenset(_NAMES.split()) | {
    f"{command}|{subcommand}" for command, text in _SUBCOMMANDS.items() for subcommand in text.split()
}
"""Full names in lower case: ``xgroup|create``."""
