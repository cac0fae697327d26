-- Pauses profiles, plans and roll-outs. Repair and serving continue.
obj.spec.reconciliation = "Paused"
return obj
