-- Resumes profiles, plans and roll-outs.
obj.spec.reconciliation = "Active"
return obj
