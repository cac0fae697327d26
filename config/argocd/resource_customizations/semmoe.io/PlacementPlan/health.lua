-- Argo CD health, from the conditions of the current generation. Only Lua's base and table libraries are used, because scripts in
-- argocd-cm have no others.
local health = {status = "Progressing", message = "Waiting for the operator to report"}

if obj.metadata.deletionTimestamp ~= nil then
  health.message = "Being deleted"
  return health
end
if obj.status == nil or obj.status.conditions == nil then
  return health
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  health.message = "Waiting for the operator to observe generation " .. tostring(obj.metadata.generation)
  return health
end

local conditions = {}
for _, condition in ipairs(obj.status.conditions) do
  conditions[condition.type] = condition
end
local function holds(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end
local function report(status, condition)
  health.status = status
  health.message = condition.reason .. ": " .. condition.message
  return health
end

if holds("Stalled") then
  return report("Degraded", conditions.Stalled)
end
if holds("Degraded") then
  return report("Degraded", conditions.Degraded)
end
if conditions.Ready ~= nil and not holds("Ready") then
  return report("Progressing", conditions.Ready)
end
if holds("Reconciling") then
  return report("Progressing", conditions.Reconciling)
end
if holds("Ready") then
  return report("Healthy", conditions.Ready)
end
return health
