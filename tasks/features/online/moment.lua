local byte, unpack_bytes = string.byte, struct.unpack

-- Seconds, nanoseconds, created and origin of a stored time, as `_stored_times` lays it out.
local function moment(text)
  local seconds, nanos, created, origin, at = 0, 0, -math.huge, nil, 1
  while at <= #text do
    local tag = byte(text, at)
    if tag == 25 or tag == 33 then
      local value = unpack_bytes('<i8', text, at + 1)
      if tag == 25 then created = value else origin = value end
      at = at + 9
    else
      local value, inverse, scale, first = 0, 0, 1, at + 1
      repeat
        at = at + 1
        local group = byte(text, at) % 128
        value = value + group * scale
        if at - first < 9 then inverse = inverse + (127 - group) * scale end
        scale = scale * 128
      until byte(text, at) < 128
      if at - first == 9 then value = -inverse - 1 end -- ten bytes: a negative number
      at = at + 1
      if tag == 8 then seconds = value else nanos = value end
    end
  end
  return seconds, nanos, created, origin
end
