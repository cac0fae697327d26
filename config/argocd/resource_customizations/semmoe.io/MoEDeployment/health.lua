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
if obj.spec.reconciliation == "Paused" then
  health.status = "Suspended"
  health.message = "spec.reconciliation is Paused: nothing is rolled out"
  if conditions.Ready ~= nil then
    health.message = health.message .. ". " .. conditions.Ready.message
  end
  return health
end
if conditions.Ready ~= nil and not holds("Ready") then
  return report("Progressing", conditions.Ready)
end
if holds("Reconciling") then
  return report("Progressing", conditions.Reconciling)
end
-- A plan waits for the approval of a user. Until then the serving revision is healthy.
local waits = {AwaitingApproval = true, RolloutInterruptsService = true, NoRouter = true, CanaryInconclusive = true, Advisory = true}
if holds("Ready") and conditions.RolledOut ~= nil and conditions.RolledOut.status == "False" and waits[conditions.RolledOut.reason] then
  return report("Suspended", conditions.RolledOut)
end
if holds("Ready") then
  return report("Healthy", conditions.Ready)
end
return health
