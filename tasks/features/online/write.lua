-- Writes entities that are not older than what is stored; returns how many.
local KEYS, ARGV, call, unpack = KEYS, ARGV, redis.call, unpack
local ttl, began, end_us = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local count, time_field = tonumber(ARGV[4]), ARGV[5]
local hash = {}
for i = 0, count - 1 do hash[2 * i + 1] = ARGV[5 + i] end

local function is_taken(key, new)
  local old = call('HGET', key, time_field)
  if not old then return true end
  local old_s, old_n, old_created, old_origin = moment(old)
  local new_s, new_n, new_created = moment(new)
  if new_s ~= old_s then
    if new_s > old_s then return true end
  elseif new_n ~= old_n then
    if new_n > old_n then return true end
  elseif new_created ~= old_created then
    if new_created > old_created then return true end
  elseif began == 0 or (old_origin or 0) <= began then
    return true
  end
  return old_origin and old_origin > 0 and old_origin < began
    and old_s * 1000000 + old_n / 1000 <= end_us
end

local written, start = 0, 5 + count
for k = 1, #KEYS do
  local key = KEYS[k]
  if is_taken(key, ARGV[start]) then
    for i = 0, count - 1 do hash[2 * i + 2] = ARGV[start + i] end
    for i = 1, 2 * count, 4000 do -- as many as fit on the script's stack
      call('HSET', key, unpack(hash, i, math.min(i + 3999, 2 * count)))
    end
    if ttl > 0 then call('EXPIRE', key, ttl) end
    written = written + 1
  end
  start = start + count
end
return written
