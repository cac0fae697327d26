# Sem-MoE operator. `make help` lists the targets.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= dev
IMAGE ?= semmoe:$(VERSION)
TOOL := go tool -modfile=internal/tools/go.mod
KUBERNETES := bin/kubernetes-$(shell awk '$$1 == "k8s.io/kubernetes" { print $$2; exit }' test/kubernetes/go.mod)

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: bin/semmoe ## Build the static binary bin/semmoe

.PHONY: bin/semmoe
bin/semmoe:
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o $@ ./cmd/semmoe

.PHONY: image
image: bin/semmoe ## Build the container image dist/semmoe.tar (OCI layout), without docker or a registry
	@mkdir -p dist
	go run ./internal/image/cmd/mkimage --binary bin/semmoe --name $(IMAGE) --out dist/semmoe.tar

.PHONY: generate
generate: ## Generate deep copies, apply configurations, CRDs and RBAC
	$(TOOL) controller-gen object applyconfiguration crd:generateEmbeddedObjectMeta=true paths=./api/... output:crd:artifacts:config=config/crd
	cd internal/tools && go run ./crdtrim $(addprefix ../../,$(wildcard config/crd/semmoe.io_*.yaml))
	$(TOOL) controller-gen rbac:roleName=semmoe-manager paths=./controllers/... output:rbac:artifacts:config=config/rbac
	gofmt -l -w api

##@ Check

.PHONY: test
test: build controlplane ## Run every test that needs no root
	go test -race -timeout 20m ./...

.PHONY: verify
verify: ## Fail on unformatted, vetted or generated drift
	internal/tools/verify.sh

.PHONY: demo
demo: build controlplane ## From nothing to a served model, on a local control plane (KEEP=1 leaves it up; KUBECONFIG=... uses that cluster)
	CGO_ENABLED=0 go run -trimpath ./test/demo # the flags of bin/semmoe: what is compiled for one serves the other

.PHONY: e2e
e2e: build controlplane ## Run the end-to-end suite in full on the local control plane
	go test -race -count=1 -timeout 90m ./test/e2e -args -full
	go test -count=1 -timeout 90m ./test/scale -v -args -full
	go test -race -count=1 -timeout 90m ./test/walk -v -args -full

.PHONY: e2e-cluster
e2e-cluster: image ## Run the demo's scenario on a real cluster (kubelet, containerd, CoreDNS) made for it; needs root
	test/cluster/e2e.sh

.PHONY: bench
bench: ## Measure, and print JSON (BENCH=solver, BENCH=router, BENCH=reshuffle or BENCH="metis [TRACE]": that alone)
	@$(MAKE) -s build >&2
	@go run ./test/bench $(BENCH)

.PHONY: soak
soak: build controlplane ## Long fuzz and fault runs
	test/soak.sh

.PHONY: controlplane
controlplane: ## Build etcd and the Kubernetes control plane from Go modules (once, about seven minutes)
	@test/kubernetes/build.sh >/dev/null

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin dist
