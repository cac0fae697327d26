// Package gitops tests what GitOps tools make of the operator's objects: the health checks for Argo CD in config/argocd, over real
// objects of every state that the end-to-end suite has seen, beside what kstatus and kubectl say of the same objects.
package gitops
