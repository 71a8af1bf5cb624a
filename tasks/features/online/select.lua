-- Counts or removes values of some keys, each in one step; Redis drops a hash without fields.
local rule, act, time_field = ARGV[1], ARGV[2], ARGV[3]
local began, start_us, end_us = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local function is_meant(old)
  if rule == 'all' then return true end
  local seconds, nanos, _, origin = moment(old)
  if rule == 'unknown' then return origin == nil end
  if rule == 'not of the table' then return not origin or origin == 0 end
  local us = seconds * 1000000 + nanos / 1000
  return origin and origin > 0 and origin < began and us >= start_us and us <= end_us
end

local found = 0
for k = 1, #KEYS do
  local old = redis.call('HGET', KEYS[k], time_field)
  if old and is_meant(old) then
    local held = 1
    if act == 'remove' then
      held = 0
      for i = 7, #ARGV do held = held + redis.call('HDEL', KEYS[k], ARGV[i]) end
    end
    if held > 0 then found = found + 1 end
  end
end
return found
