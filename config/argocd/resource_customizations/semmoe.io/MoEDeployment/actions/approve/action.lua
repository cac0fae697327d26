-- Approves the plan, or the change on its canary, that waits for approval.
local plan = (obj.status or {}).pendingPlan
if plan == nil then
  error("nothing waits for approval: see the condition RolledOut")
end
obj.metadata.annotations = obj.metadata.annotations or {}
obj.metadata.annotations["semmoe.io/approve"] = plan
return obj
