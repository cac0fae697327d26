package alerts

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/promqltest"
)

// onSeries says for each rule on which series it fires, and on which it stays silent: at the edges of what it asks for, and of how long.
// Series are in minutes, and "_" is a minute without a sample.
var onSeries = map[string]struct {
	// alert is the rule's name, severity and what it is of, as describe has it.
	alert  string
	series string
	// fires is the minute at which it fires first, within 200; -1 for never.
	fires int
}{
	"clients are refused": {"SemMoENoServingPod critical a/m", `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 1x9 0x200
		semmoe_router_backends{namespace="a",name="m",pod="r2"} 1x9 0x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 0x10 3+3x200`, 13},
	"one of two routers sees a pod": {"SemMoENoServingPod critical a/m", `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 0x200
		semmoe_router_backends{namespace="a",name="m",pod="r2"} 1x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 0+3x200`, -1},
	"nobody asks": {"SemMoENoServingPod critical a/m", `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 0x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 7x200`, -1},
	"engines that are busy say 503": {"SemMoENoServingPod critical a/m", `
		semmoe_router_backends{namespace="a",name="m",pod="r1"} 2x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="503"} 0+3x200`, -1},

	"nothing is ready": {"SemMoENoServingPod warning a/m", `
		semmoe_replicas{namespace="a",name="m",state="desired"} 2x200
		semmoe_replicas{namespace="a",name="m",state="ready"} 1x9 0x200`, 40},
	"engines load": {"SemMoENoServingPod warning a/m", `
		semmoe_replicas{namespace="a",name="m",state="desired"} 2x200
		semmoe_replicas{namespace="a",name="m",state="ready"} 0x29 1x200`, -1},
	"scaled to zero": {"SemMoENoServingPod warning a/m", `
		semmoe_replicas{namespace="a",name="m",state="desired"} 0x200
		semmoe_replicas{namespace="a",name="m",state="ready"} 0x200`, -1},
	"the managers go": {"SemMoENoServingPod warning a/m", `
		semmoe_replicas{namespace="a",name="m",state="desired"} 2x20
		semmoe_replicas{namespace="a",name="m",state="ready"} 0x20`, -1},

	"2% are refused": {"SemMoERouterShedding warning a/m", `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 0+98x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0+2x200`, 6},
	"1% is refused": {"SemMoERouterShedding warning a/m", `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 0+99x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0+1x200`, -1},
	"a burst is refused": {"SemMoERouterShedding warning a/m", `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 0+98x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0x50 80x150`, -1},
	"nobody asks, and nobody is refused": {"SemMoERouterShedding warning a/m", `
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="200"} 5x200
		semmoe_router_requests_total{namespace="a",name="m",pod="r1",code="429"} 0x200`, -1},

	"degraded": {"SemMoEDegraded warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 0x9 1x200
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Stalled"} 0x200`, 25},
	"stalled, not degraded": {"SemMoEDegraded warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 0x200
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Stalled"} 0x9 1x200`, 25},
	"degraded for moments": {"SemMoEDegraded warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Degraded"} 1x14 0 1x14 0 1x14 0x150`, -1},
	"a degraded profile": {"SemMoEDegraded warning a/m", `
		semmoe_condition{kind="AffinityProfile",namespace="a",name="m",type="Degraded"} 1x200`, -1},

	"below target": {"SemMoELocalityBelowTarget warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="LocalityOnTarget"} 1x9 0x200`, 70},
	"below target, for 59 minutes": {"SemMoELocalityBelowTarget warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="LocalityOnTarget"} 1x9 0x59 1x100`, -1},
	"not measurable": {"SemMoELocalityBelowTarget warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="LocalityOnTarget"} -1x200`, -1},

	"drift rises": {"SemMoEDriftRising info a/m", `
		semmoe_drift_statistic{namespace="a",name="m"} 0+1x200
		semmoe_drift_threshold{namespace="a",name="m"} 100x200`, 81},
	"drift by chance": {"SemMoEDriftRising info a/m", `
		semmoe_drift_statistic{namespace="a",name="m"} 0.1x20 0.7x25 0.1x150
		semmoe_drift_threshold{namespace="a",name="m"} 1x200`, -1},
	"no test": {"SemMoEDriftRising info a/m", `
		semmoe_plan_age_seconds{namespace="a",name="m"} 0+60x200`, -1},

	"old, and nobody looks": {"SemMoEPlanStale info a/m", `
		semmoe_plan_age_seconds{namespace="a",name="m"} 604200+60x200`, 71},
	"old, and looked at": {"SemMoEPlanStale info a/m", `
		semmoe_plan_age_seconds{namespace="a",name="m"} 9e6+60x200
		semmoe_drift_statistic{namespace="a",name="m"} 0x200`, -1},
	"old, and looked at two hours ago": {"SemMoEPlanStale info a/m", `
		semmoe_plan_age_seconds{namespace="a",name="m"} 9e6+60x200
		semmoe_drift_statistic{namespace="a",name="m"} 0x80`, -1},
	"old, with something to lose": {"SemMoEPlanStale info a/m", `
		semmoe_plan_age_seconds{namespace="a",name="m"} 604200+60x200
		semmoe_lar_promised_ratio{namespace="a",name="m"} 0.3x200
		semmoe_lar_baseline_ratio{namespace="a",name="m"} 0.125x200`, 71},
	"old, with nothing to lose": {"SemMoEPlanStale info a/m", `
		semmoe_plan_age_seconds{namespace="a",name="m"} 604200+60x200
		semmoe_lar_promised_ratio{namespace="a",name="m"} 0.125x200
		semmoe_lar_baseline_ratio{namespace="a",name="m"} 0.125x200`, -1},
	"young": {"SemMoEPlanStale info a/m", `
		semmoe_plan_age_seconds{namespace="a",name="m"} 500000+60x200`, -1},

	"a canary for two hours": {"SemMoERolloutStuck warning a/m", `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 300x200`, 126},
	"a canary that soaks for an hour": {"SemMoERolloutStuck warning a/m", `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 3600x200`, -1},
	"a canary that soaks for ten minutes": {"SemMoERolloutStuck warning a/m", `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 600x200`, 186},
	"a canary that hardly soaks": {"SemMoERolloutStuck warning a/m", `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x200
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 60x200`, 126},
	"a canary that is promoted": {"SemMoERolloutStuck warning a/m", `
		semmoe_rollout_phase_start_time_seconds{namespace="a",name="m"} 0x100 6000x100
		semmoe_rollout_soak_seconds{namespace="a",name="m"} 300x200`, -1},
	"a change of the spec": {"SemMoERolloutStuck warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Reconciling"} 0x9 1x200`, 70},
	"a change that arrives": {"SemMoERolloutStuck warning a/m", `
		semmoe_condition{kind="MoEDeployment",namespace="a",name="m",type="Reconciling"} 1x55 0x145`, -1},

	"no profile": {"SemMoEProfilingFailed warning a/p", `
		semmoe_condition{kind="AffinityProfile",namespace="a",name="p",type="Degraded"} 0x9 1x200`, 20},
	"a profile that is tried again": {"SemMoEProfilingFailed warning a/p", `
		semmoe_condition{kind="AffinityProfile",namespace="a",name="p",type="Degraded"} 1x8 0x190`, -1},
	"no plan": {"SemMoEPlanningFailed warning a/q", `
		semmoe_condition{kind="PlacementPlan",namespace="a",name="q",type="Degraded"} 0x9 1x200`, 20},
	"a plan that is deleted": {"SemMoEPlanningFailed warning a/q", `
		semmoe_condition{kind="PlacementPlan",namespace="a",name="q",type="Degraded"} 1x4`, -1},

	"nearly full": {"SemMoEStoreFull warning s/store-0", `
		semmoe_store_free_bytes{namespace="s",pod="store-0"} 100-1x100
		semmoe_store_capacity_bytes{namespace="s",pod="store-0"} 800x200`, 25},
	"a volume that cannot be asked": {"SemMoEStoreFull warning s/store-0", `
		semmoe_store_free_bytes{namespace="s",pod="store-0"} 0x200
		semmoe_store_capacity_bytes{namespace="s",pod="store-0"} 0x200`, 5},
	"a bucket that refuses": {"SemMoEStoreFull warning s/store-0", `
		semmoe_store_requests_total{namespace="s",pod="store-0",operation="put",code="507"} 0x19 1x200`, 25},
	"a bucket": {"SemMoEStoreFull warning s/store-0", `
		semmoe_store_requests_total{namespace="s",pod="store-0",operation="put",code="507"} 0x200
		semmoe_store_requests_total{namespace="s",pod="store-0",operation="put",code="201"} 0+1x200`, -1},
	"half full": {"SemMoEStoreFull warning s/store-0", `
		semmoe_store_free_bytes{namespace="s",pod="store-0"} 400x200
		semmoe_store_capacity_bytes{namespace="s",pod="store-0"} 800x200`, -1},

	"a damaged artifact is read": {"SemMoEStoreCorrupt warning s/store-0", `
		semmoe_store_corrupt_reads_total{namespace="s",pod="store-0"} 0x19 1x200
		semmoe_store_corrupt_reads_total{namespace="s",pod="store-1"} 0x200`, 25},
	"nothing is damaged": {"SemMoEStoreCorrupt warning s/store-0", `
		semmoe_store_corrupt_reads_total{namespace="s",pod="store-0"} 0x200`, -1},

	"no leader": {"SemMoEOperatorAbsent warning ", `
		leader_election_master_status{name="manager.semmoe.io",pod="m1"} 1x9 0x200
		leader_election_master_status{name="manager.semmoe.io",pod="m2"} 0x200`, 15},
	"nobody": {"SemMoEOperatorAbsent warning ", `up{job="other"} 1x200`, 5},
	"somebody else leads": {"SemMoEOperatorAbsent warning ", `
		leader_election_master_status{name="another",pod="m1"} 1x200`, 5},
	"a right is revoked": {"SemMoEWatchRefused warning ", `
		semmoe_watch_refused{kind="Pod",pod="m1"} _x9 1x200
		semmoe_watch_refused{kind="Pod",pod="m2"} _x12 1x200`, 11},
	"the right is back": {"SemMoEWatchRefused warning ", `
		semmoe_watch_refused{kind="Pod",pod="m1"} 1x1 0x198`, -1},

	"the other one takes over": {"SemMoEOperatorAbsent warning ", `
		leader_election_master_status{name="manager.semmoe.io",pod="m1"} 1x9 0x190
		leader_election_master_status{name="manager.semmoe.io",pod="m2"} 0x12 1x187`, -1},
}

// firstMinute is the minute at which an alert of a rule file fires first on series, within 200; -1 for never.
func firstMinute(t *testing.T, file, series, alert string) int {
	t.Helper()
	groups := loadedFrom(t, promqltest.LoadedStorage(t, "load 1m\n"+strings.TrimSpace(series)), file)
	for minute := range 200 {
		if slices.Contains(firing(t, groups, time.Unix(0, 0).Add(time.Duration(minute)*time.Minute)), alert) {
			return minute
		}
	}
	return -1
}

func TestOnSeries(t *testing.T) {
	// The rules that fire in a case, and those that are silent in one.
	fires, silent := map[string]bool{}, map[string]bool{}
	for name, tc := range onSeries {
		rule := ruleOf(tc.alert)
		if tc.fires < 0 {
			silent[rule] = true
		} else {
			fires[rule] = true
		}
		t.Run(name, func(t *testing.T) {
			if first := firstMinute(t, alertsFile, tc.series, tc.alert); first != tc.fires {
				t.Errorf("%s fires first at minute %d, not %d", tc.alert, first, tc.fires)
			}
		})
	}
	for _, rule := range parsedRules(t) {
		key := rule.Alert + " " + rule.Labels["severity"]
		if !fires[key] || !silent[key] {
			t.Errorf("%s: a case in which it fires: %v; one in which it stays silent: %v", key, fires[key], silent[key])
		}
	}
}
