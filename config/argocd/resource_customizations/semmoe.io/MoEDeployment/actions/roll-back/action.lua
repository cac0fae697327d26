-- Rolls back the plan or the change that is being rolled out.
local status = obj.status or {}
local rollout = status.rollout or {}
local candidate = rollout.candidatePlan
if rollout.candidateRevision == status.revision then
  candidate = rollout.candidateRevision -- a change of the spec
end
if candidate == nil then
  error("nothing is being rolled out: to return to an earlier plan, set spec.placement.planRef")
end
obj.metadata.annotations = obj.metadata.annotations or {}
obj.metadata.annotations["semmoe.io/rollback"] = candidate
return obj
