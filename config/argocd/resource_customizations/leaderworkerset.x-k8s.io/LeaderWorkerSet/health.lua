-- Argo CD health of a LeaderWorkerSet, from the conditions of the current generation. No condition means failure: a group that crashes
-- repeatedly is Progressing. Only Lua's base and table libraries are used, because scripts in argocd-cm have no others.
local health = {status = "Progressing", message = "Waiting for the controller of LeaderWorkerSet to report"}

if obj.metadata.deletionTimestamp ~= nil then
  health.message = "Being deleted"
  return health
end
if obj.status == nil or obj.status.conditions == nil then
  return health
end

-- Releases before 0.9 report the generation only in the conditions.
local observed = obj.status.observedGeneration
local available, updating = nil, nil
for _, condition in ipairs(obj.status.conditions) do
  observed = observed or condition.observedGeneration
  if condition.type == "Available" then
    available = condition
  elseif condition.type == "UpdateInProgress" and condition.status == "True" then
    updating = condition
  end
end
if observed ~= nil and observed ~= obj.metadata.generation then
  health.message = "Waiting for the controller of LeaderWorkerSet to look at generation " .. tostring(obj.metadata.generation)
  return health
end

local replicas = obj.spec.replicas
if replicas == nil then
  replicas = 1
end
local groups = tostring(obj.status.readyReplicas or 0) .. " of " .. tostring(replicas) .. " groups are ready"
if available ~= nil and available.status == "True" and updating == nil then
  health.status = "Healthy"
  health.message = groups
elseif updating ~= nil then
  health.message = groups .. ", " .. tostring(obj.status.updatedReplicas or 0) .. " are updated"
else
  health.message = groups
end
return health
