module github.com/semmoe/operator/test/argocd

go 1.26.0

require github.com/argoproj/argo-cd/v3 v3.4.13
