-- Argo CD actions of a MoEDeployment. An action is disabled while it has no effect. Only Lua's base and table libraries
-- are used.
local status = obj.status or {}
local annotations = obj.metadata.annotations or {}
local rollout = status.rollout or {}
local candidate = rollout.candidatePlan
if rollout.candidateRevision == status.revision then
  candidate = rollout.candidateRevision -- a change of the spec
end
local paused = obj.spec.reconciliation == "Paused"

return {
  ["approve"] = {
    displayName = "Approve",
    iconClass = "fa fa-fw fa-check",
    disabled = status.pendingPlan == nil or annotations["semmoe.io/approve"] == status.pendingPlan,
  },
  ["roll-back"] = {
    displayName = "Roll back",
    iconClass = "fa fa-fw fa-undo",
    disabled = candidate == nil or annotations["semmoe.io/rollback"] == candidate,
  },
  ["pause"] = {displayName = "Pause", iconClass = "fa fa-fw fa-pause", disabled = paused},
  ["resume"] = {displayName = "Resume", iconClass = "fa fa-fw fa-play", disabled = not paused},
}
