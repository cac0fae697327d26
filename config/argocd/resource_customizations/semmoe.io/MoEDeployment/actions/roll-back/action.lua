-- Rolls back the plan that is being rolled out.
local plan = ((obj.status or {}).rollout or {}).candidatePlan
if plan == nil then
  error("no plan is being rolled out: to return to an earlier plan, set spec.placement.planRef")
end
obj.metadata.annotations = obj.metadata.annotations or {}
obj.metadata.annotations["semmoe.io/rollback"] = plan
return obj
