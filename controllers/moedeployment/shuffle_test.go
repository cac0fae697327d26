package moedeployment

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// tokens has ranks for tokens, not for requests, and an all-to-all between them.
func tokens(m *semmoev1.MoEDeployment) {
	m.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel
	m.Spec.Engine.Args = []string{"--moe-a2a-backend", "deepep"}
}

// shuffled has an engine that sends them to the ranks of a plan's tables, too.
func shuffled(m *semmoev1.MoEDeployment) {
	tokens(m)
	m.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleEnabled
}

// tokenPlan is one for tokens that stay where they are.
func tokenPlan(name, digest string) *semmoev1.PlacementPlan {
	return moedtest.PlanOf(name, digest, func(p *semmoev1.PlacementPlan) {
		p.Spec.Attention, p.Spec.TokenShuffle = semmoev1.AttentionTensorParallel, semmoev1.TokenShuffleDisabled
		p.Status.Forecast = &semmoev1.PlanForecast{LARMilli: 250, BaselineMilli: 250, LARSummary: "25.0%", BaselineSummary: "25.0%", RemoteRanksMilli: 1800, BaselineRemoteRanksMilli: 2300}
	})
}

// A plan of tokens that stay where attention leaves them is made for few messages; one of tokens that are shuffled has the name that it
// always had, or an upgrade would cost a solve of each.
func TestPlansAreToldOfTokens(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{Result: &semmoev1.ProfileResult{Digest: "d"}}}
	profile.Name = "p"
	of := func(change ...func(*semmoev1.MoEDeployment)) *semmoev1.PlacementPlan {
		return planFor(moedtest.Deployment(change...), profile, semmoev1.RealizationEngineMap)
	}
	plain, stay, move := of(), of(tokens), of(shuffled)
	if plain.Spec.TokenShuffle != "" || stay.Spec.TokenShuffle != semmoev1.TokenShuffleDisabled || move.Spec.TokenShuffle != "" {
		t.Errorf("plans are told %q, %q and %q", plain.Spec.TokenShuffle, stay.Spec.TokenShuffle, move.Spec.TokenShuffle)
	}
	if plain.Name != "m-b9e28e5c" || stay.Name == move.Name {
		t.Errorf("their names are %s, %s and %s", plain.Name, stay.Name, move.Name)
	}
	for name, tc := range map[string]struct {
		change func(*semmoev1.MoEDeployment)
		plan   *semmoev1.PlacementPlan
		fits   bool
	}{
		"tokens that stay":               {tokens, stay, true},
		"a plan for tokens that move":    {tokens, move, false},
		"tokens that move":               {shuffled, move, true},
		"a plan for tokens that stay":    {shuffled, stay, false},
		"requests, a plan for requests":  {nil, plain, true},
		"requests, one of tokens":        {nil, move, false},
		"requests, one of staying ones":  {nil, stay, false},
		"tokens, and a plan of requests": {shuffled, plain, false},
	} {
		moed := moedtest.Deployment()
		if tc.change != nil {
			tc.change(moed)
		}
		if err := CheckPin(moed, tc.plan); (err == nil) != tc.fits {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A plan for tokens is rolled out where there is an all-to-all, keeps serving, and goes where it does not fit any more.
func TestChooseLayoutForTokens(t *testing.T) {
	old, fresh := tokenPlan("old", "aa"), tokenPlan("new", "bb")
	under := func(plan *semmoev1.PlacementPlan, change func(*semmoev1.MoEDeployment)) []*workload {
		made, err := render(moedtest.Deployment(change), "r1", moedtest.Report(), layoutOf(plan, semmoev1.RealizationEngineMap), own{Image: "semmoe:1"})
		if err != nil {
			t.Fatal(err)
		}
		*made.replicas() = 2
		return []*workload{made}
	}
	of := func(plan *semmoev1.PlacementPlan) *layout { return layoutOf(plan, semmoev1.RealizationEngineMap) }
	for name, tc := range map[string]struct {
		change    func(*semmoev1.MoEDeployment)
		workloads []*workload
		want, try *layout
		hold      string
		says      string
	}{
		"the first":             {change: tokens, want: of(fresh)},
		"in service":            {change: tokens, workloads: under(fresh, tokens), want: of(fresh)},
		"in place of another":   {change: tokens, workloads: under(old, tokens), want: of(old), try: of(fresh)},
		"no router, no matter":  {change: func(m *semmoev1.MoEDeployment) { tokens(m); m.Spec.Routing.Mode = semmoev1.RoutingModeNone }, want: of(fresh)},
		"no all-to-all":         {change: func(m *semmoev1.MoEDeployment) { tokens(m); m.Spec.Engine.Args = nil }, hold: "NotRealizable", says: "spec.parallelism.attention is TensorParallel"},
		"waits to be approved":  {change: func(m *semmoev1.MoEDeployment) { tokens(m); m.Spec.Placement.Approval = semmoev1.ApprovalManual }, hold: "AwaitingApproval", says: "on 1.80 other ranks, against 2.30 without it"},
		"another size":          {change: func(m *semmoev1.MoEDeployment) { tokens(m); m.Spec.Parallelism.ExpertParallelSize = 8 }, workloads: under(old, tokens)},
		"attention of requests": {change: func(*semmoev1.MoEDeployment) {}, workloads: under(old, tokens)},
	} {
		t.Run(name, func(t *testing.T) {
			c := choice{moed: moedtest.Deployment(tc.change), report: moedtest.Report(), wanted: fresh, workloads: tc.workloads}
			serving, candidate, hold := c.chooseLayout()
			if diff := cmp.Diff([]*layout{tc.want, tc.try}, []*layout{serving, candidate}); diff != "" || hold.reason != tc.hold || !strings.Contains(hold.message, tc.says) {
				t.Errorf("holds because of %q (%s), want %q; what serves, and what is tried (-want +got):\n%s", hold.reason, hold.message, tc.hold, diff)
			}
		})
	}
}

// Tables reach the engine's container alone as files and variables; the token for the store reaches the container that fetches.
func TestRenderWithTables(t *testing.T) {
	plan := layoutOf(moedtest.PlanOf("m-1", "0123456789abcdef", nil), semmoev1.RealizationEngineMap)
	store := []corev1.EnvVar{{Name: "SEMMOE_STORE_URL", Value: "https://store"}, {Name: "SEMMOE_STORE_CA", Value: "ca"}}
	rendered := func(plan *layout, change func(*semmoev1.MoEDeployment)) corev1.PodSpec {
		workload, err := render(moedtest.Deployment(change), "r1", moedtest.Report(), plan, own{"semmoe:1", store})
		if err != nil {
			t.Fatal(err)
		}
		return workload.template().Spec
	}
	variables := func(c corev1.Container) map[string]string {
		values := map[string]string{}
		for _, v := range c.Env {
			if strings.HasPrefix(v.Name, "SEMMOE_") {
				values[v.Name] = v.Value
			}
		}
		return values
	}
	spec := rendered(plan, shuffled)
	if diff := cmp.Diff([]string{"verify-plan", "fetch-tables", "prove-lossless"}, initContainers(corev1.PodTemplateSpec{Spec: spec})); diff != "" {
		t.Fatalf("init containers (-want +got):\n%s", diff)
	}
	fetch, engine := spec.InitContainers[1], spec.Containers[0]
	want := []string{"fetch", "--namespace=$(POD_NAMESPACE)", "--plan-digest=" + plan.Digest, "--out=/var/lib/semmoe/plan", "--optional"}
	if diff := cmp.Diff(want, fetch.Args); diff != "" || variables(fetch)["SEMMOE_STORE_URL"] != "https://store" {
		t.Errorf("it knows %v, and runs (-want +got):\n%s", variables(fetch), diff)
	}
	if diff := cmp.Diff(map[string]string{
		"SEMMOE_TABLES": "/var/lib/semmoe/plan/tables.safetensors", "SEMMOE_PLACEMENT": "/var/lib/semmoe/plan/placement.json", "SEMMOE_PLAN_DIGEST": plan.Digest,
	}, variables(engine)); diff != "" {
		t.Errorf("the engine's variables (-want +got):\n%s", diff)
	}
	mounted := func(c corev1.Container, name string) *corev1.VolumeMount {
		i := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
		if i < 0 {
			return nil
		}
		return &c.VolumeMounts[i]
	}
	if m := mounted(engine, "semmoe-tables"); m == nil || m.MountPath != "/var/lib/semmoe" || !m.ReadOnly || mounted(engine, "semmoe-store-token") != nil {
		t.Errorf("the engine mounts %+v", engine.VolumeMounts)
	}
	if m := mounted(fetch, "semmoe-tables"); m == nil || m.ReadOnly || mounted(fetch, "semmoe-store-token") == nil {
		t.Errorf("fetch-tables mounts %+v", fetch.VolumeMounts)
	}
	if at := slices.Index(spec.InitContainers[2].Args, "--ranks=1"); at < 0 {
		t.Errorf("requests without ranks are pinned: %v", spec.InitContainers[2].Args)
	}
	for name, spec := range map[string]corev1.PodSpec{"tokens that stay": rendered(plan, tokens), "no plan": rendered(nil, shuffled)} {
		if names := initContainers(corev1.PodTemplateSpec{Spec: spec}); slices.Contains(names, "fetch-tables") || len(variables(spec.Containers[0])) > 0 {
			t.Errorf("%s: init containers %v, variables %v", name, names, variables(spec.Containers[0]))
		}
	}
}

func TestShuffleIsTold(t *testing.T) {
	fetched := func(message string, code int32) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "fetch-tables", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: message}}}}
		}
	}
	o := observation{Revision: "r", Pods: []*corev1.Pod{
		moedtest.Pod("a", "r", fetched("", 0)), moedtest.Pod("b", "r", fetched("the store is away\n", 0)), moedtest.Pod("c", "r", moedtest.Unready), moedtest.Pod("d", "r", fetched("x", 1)), moedtest.Pod("e", "old", fetched("", 0)),
	}, Workers: []*corev1.Pod{moedtest.Pod("f", "r", fetched("", 0))}}
	const want = ". The tables by which the engine shuffles tokens were given to 2 of 5 pods; pod b: the store is away"
	if got := shuffleText(moedtest.Deployment(shuffled), o); got != want {
		t.Errorf("%q", got)
	}
	if got := shuffleText(moedtest.Deployment(tokens), o); got != "" {
		t.Errorf("of tokens that stay: %q", got)
	}
}

// New tables cannot reach an engine that has read its own.
func TestNewTablesNeedRequestsWithRanks(t *testing.T) {
	tables := moedtest.PlanOf("new", "bb", nil)
	if hold := holdTables(moedtest.Deployment(shuffled), tables); hold.reason != "EngineKeepsTables" {
		t.Errorf("%+v", hold)
	}
	if hold := holdTables(moedtest.Deployment(), tables); hold.reason != "" {
		t.Errorf("of requests: %+v", hold)
	}
}

// What has no all-to-all is refused where a plan is asked for, and serves without one.
func TestPlansNeedAnExchange(t *testing.T) {
	plan := func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.PlanRef = &semmoev1.PlanReference{Name: "p"}
		m.Spec.Routing.SamplePercent = ptr.To[int32](0)
	}
	for _, engine := range []semmoev1.EngineType{semmoev1.EngineSGLang, semmoev1.EngineVLLM, semmoev1.EngineVLLMAscend, semmoev1.EngineTensorRTLLM} {
		of := func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Parallelism.Attention = engine, semmoev1.AttentionTensorParallel
		}
		if err := validate(moedtest.Deployment(of)); err != nil {
			t.Errorf("%s without a plan: %v", engine, err)
		}
		err := validate(moedtest.Deployment(of, plan))
		if refused := err != nil && err.reason == "NoAllToAll" && strings.HasPrefix(err.message, "spec.parallelism.attention: "); refused != (engine != semmoev1.EngineSGLang) {
			t.Errorf("%s with a plan: %v", engine, err)
		}
	}
	ours := func(m *semmoev1.MoEDeployment) {
		shuffled(m)
		m.Spec.Engine.Env = []corev1.EnvVar{{Name: "SEMMOE_TABLES", Value: "/mine"}}
	}
	if err := validate(moedtest.Deployment(ours)); err == nil || !strings.Contains(err.message, "spec.engine.env: SEMMOE_TABLES") {
		t.Errorf("a variable of the operator's: %v", err)
	}
}
