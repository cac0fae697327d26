// SPDX-License-Identifier: Apache-2.0

package front

import (
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// peer is a pod that connects to a pod of the deployment.
type peer struct{ namespace, pod map[string]string }

// allows evaluates a policy of namespace ns according to the API definition.
func allows(t *testing.T, policy networkingv1.NetworkPolicy, from peer, protocol corev1.Protocol, port int32) bool {
	t.Helper()
	matches := func(selector *metav1.LabelSelector, set map[string]string) bool {
		s, err := metav1.LabelSelectorAsSelector(selector)
		if err != nil {
			t.Fatal(err)
		}
		return s.Matches(labels.Set(set))
	}
	for _, rule := range policy.Spec.Ingress {
		peers, ports := len(rule.From) == 0, len(rule.Ports) == 0
		for _, p := range rule.From {
			inNamespace := from.namespace[corev1.LabelMetadataName] == "ns"
			if p.NamespaceSelector != nil {
				inNamespace = matches(p.NamespaceSelector, from.namespace)
			}
			peers = peers || inNamespace && (p.PodSelector == nil || matches(p.PodSelector, from.pod))
		}
		for _, p := range rule.Ports {
			last := p.Port.IntVal
			if p.EndPort != nil {
				last = *p.EndPort
			}
			ports = ports || *p.Protocol == protocol && p.Port.IntVal <= port && port <= last
		}
		if peers && ports {
			return true
		}
	}
	return false
}

func TestNetworkPolicies(t *testing.T) {
	ours := map[string]string{corev1.LabelMetadataName: "ns"}
	of := func(deployment, component string) peer {
		return peer{ours, map[string]string{semmoev1.LabelDeployment: deployment, semmoev1.LabelComponent: component}}
	}
	routerPod, enginePod, otherRouter := of("m", semmoev1.ComponentRouter), of("m", semmoev1.ComponentEngine), of("other", semmoev1.ComponentRouter)
	client := peer{map[string]string{corev1.LabelMetadataName: "elsewhere"}, nil}
	impostor := peer{client.namespace, routerPod.pod}
	operator := peer{map[string]string{corev1.LabelMetadataName: "semmoe-system"}, nil}
	prometheus := peer{map[string]string{corev1.LabelMetadataName: "monitoring", semmoev1.LabelMonitoring: "enabled"}, nil}
	picker := func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker }
	named := func(m *semmoev1.MoEDeployment) {
		picker(m)
		m.Spec.Routing.GatewayNamespaces = []string{"gateways", "elsewhere"}
	}
	const engine, router = "m", "m-router"
	onPort := func(port int32) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Port = port }
	}
	events := func(m *semmoev1.MoEDeployment) { // of four ranks, around the serving port
		m.Spec.Parallelism.ExpertParallelSize, m.Spec.Parallelism.Attention = 4, semmoev1.AttentionDataParallel
		m.Spec.Routing.KVEvents = &semmoev1.RoutingKVEvents{Port: 5557}
	}
	old := Engines{Pods: []*corev1.Pod{moedtest.Pod("old", "r1", func(p *corev1.Pod) { p.Annotations = map[string]string{semmoev1.AnnotationPort: "30000"} })}}

	cases := map[string]struct {
		change   func(*semmoev1.MoEDeployment)
		target   string // component that the Service selects
		outside  bool   // the operator runs outside the cluster
		engines  Engines
		policy   string
		from     peer
		protocol corev1.Protocol
		port     int32
		want     bool
	}{
		"router to engine":                       {policy: engine, from: routerPod, port: 30000, want: true},
		"engine to engine":                       {policy: engine, from: enginePod, port: 30000, want: true},
		"operator to engine":                     {policy: engine, from: operator, port: 30000, want: true},
		"monitoring to engine":                   {policy: engine, from: prometheus, port: 30000, want: true},
		"client to engine":                       {policy: engine, from: client, port: 30000},
		"pod of the namespace to engine":         {policy: engine, from: peer{ours, nil}, port: 30000},
		"router of another deployment to engine": {policy: engine, from: otherRouter, port: 30000},
		"a router's labels in another namespace": {policy: engine, from: impostor, port: 30000},
		"collectives, below":                     {policy: engine, from: client, port: 29999, want: true},
		"collectives, above":                     {policy: engine, from: client, port: 30001, want: true},
		"collectives, the last port":             {policy: engine, from: client, port: 65535, want: true},
		"collectives, UDP on that number":        {policy: engine, from: client, protocol: corev1.ProtocolUDP, port: 30000, want: true},
		"operator outside: it is not locked out": {outside: true, policy: engine, from: client, port: 30000, want: true},
		"smallest serving port":                  {change: func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Port = 1 }, policy: engine, from: client, port: 1},
		"largest serving port":                   {change: func(m *semmoev1.MoEDeployment) { m.Spec.Engine.Port = 65535 }, policy: engine, from: client, port: 65535},

		"another port, its pods still there": {change: onPort(31000), engines: old, policy: engine, from: client, port: 30000},
		"another port, before its pods":      {change: onPort(31000), engines: old, policy: engine, from: client, port: 31000},
		"another port, collectives between":  {change: onPort(31000), engines: old, policy: engine, from: client, port: 30500, want: true},
		"another port, collectives above":    {change: onPort(31000), engines: old, policy: engine, from: client, port: 31001, want: true},
		"another port, router to old engine": {change: onPort(31000), engines: old, policy: engine, from: routerPod, port: 30000, want: true},
		"another port, old pods gone":        {change: onPort(31000), policy: engine, from: client, port: 30000, want: true},
		"the next port":                      {change: onPort(30001), engines: old, policy: engine, from: client, port: 30000},

		"router to KV events":              {change: events, policy: engine, from: routerPod, port: 5557, want: true},
		"router to replays":                {change: events, policy: engine, from: routerPod, port: 5564, want: true},
		"client to KV events":              {change: events, policy: engine, from: client, port: 5557},
		"client to replays":                {change: events, policy: engine, from: client, port: 5564},
		"operator to KV events":            {change: events, policy: engine, from: operator, port: 5557},
		"client to the port before":        {change: events, policy: engine, from: client, port: 5556, want: true},
		"client to the port after":         {change: events, policy: engine, from: client, port: 5565, want: true},
		"client to serving with KV events": {change: events, policy: engine, from: client, port: 30000},
		"client to no KV events":           {policy: engine, from: client, port: 5557, want: true},

		"client to router":                {policy: router, from: client, port: 8000, want: true},
		"client to metrics":               {policy: router, from: client, port: 9090},
		"operator to metrics":             {policy: router, from: operator, port: 9090, want: true},
		"operator to observations":        {policy: router, from: operator, port: 9091, want: true},
		"monitoring to observations":      {policy: router, from: prometheus, port: 9091},
		"client to observations":          {policy: router, from: client, port: 9091},
		"client to picker's observations": {change: picker, target: semmoev1.ComponentEngine, policy: router, from: client, port: 9091},
		"monitoring to metrics":           {policy: router, from: prometheus, port: 9090, want: true},
		"operator outside: metrics":       {outside: true, policy: router, from: client, port: 9090, want: true},
		"operator outside: observations":  {outside: true, policy: router, from: client, port: 9091, want: true},
		"Gateway to picker":               {change: picker, target: semmoev1.ComponentEngine, policy: router, from: client, port: 9002, want: true},
		"Gateway to picker's health":      {change: picker, target: semmoev1.ComponentEngine, policy: router, from: client, port: 9003, want: true},
		"named Gateway to picker":         {change: named, target: semmoev1.ComponentEngine, policy: router, from: client, port: 9002, want: true},
		"named Gateway to health":         {change: named, target: semmoev1.ComponentEngine, policy: router, from: client, port: 9003, want: true},
		"another Gateway to picker":       {change: named, target: semmoev1.ComponentEngine, policy: router, from: prometheus, port: 9002},
		"own namespace to picker":         {change: named, target: semmoev1.ComponentEngine, policy: router, from: enginePod, port: 9002},
		"monitoring to picker's metrics":  {change: named, target: semmoev1.ComponentEngine, policy: router, from: prometheus, port: 9090, want: true},
		"client to picker's metrics":      {change: picker, target: semmoev1.ComponentEngine, policy: router, from: client, port: 9090},
		"client to the port of the proxy": {change: picker, target: semmoev1.ComponentEngine, policy: router, from: client, port: 8000},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed, namespace, target, protocol := moedtest.Deployment(), "semmoe-system", semmoev1.ComponentRouter, corev1.ProtocolTCP
			if tc.change != nil {
				tc.change(moed)
			}
			if tc.outside {
				namespace = ""
			}
			if tc.target != "" {
				target = tc.target
			}
			if tc.protocol != "" {
				protocol = tc.protocol
			}
			data, err := json.Marshal(networkPolicies(moed, target, namespace, tc.engines)[tc.policy])
			if err != nil {
				t.Fatal(err)
			}
			var policy networkingv1.NetworkPolicy
			if err := json.Unmarshal(data, &policy); err != nil || policy.Name != tc.policy {
				t.Fatalf("policy %s, %v", data, err)
			}
			if got := allows(t, policy, tc.from, protocol, tc.port); got != tc.want {
				t.Errorf("allowed is %v, want %v, by %s", got, tc.want, data)
			}
			if types := policy.Spec.PolicyTypes; len(types) != 1 || types[0] != networkingv1.PolicyTypeIngress {
				t.Errorf("policy types are %v, want ingress only", types)
			}
		})
	}
}

// The policy of engines exists only while the Service selects the router, and no policy exists if the spec wants none.
func TestCreatedNetworkPolicies(t *testing.T) {
	mode := func(mode semmoev1.RoutingMode) func(*semmoev1.MoEDeployment) {
		return func(m *semmoev1.MoEDeployment) { m.Spec.Routing.Mode = mode }
	}
	cases := map[string]struct {
		change func(*semmoev1.MoEDeployment)
		target string
		want   []string
	}{
		"router":                {mode(semmoev1.RoutingModeRouter), semmoev1.ComponentRouter, []string{"m", "m-router"}},
		"router, not yet":       {mode(semmoev1.RoutingModeRouter), semmoev1.ComponentEngine, []string{"m-router"}},
		"endpoint picker":       {mode(semmoev1.RoutingModeEndpointPicker), semmoev1.ComponentEngine, []string{"m-router"}},
		"no router":             {mode(semmoev1.RoutingModeNone), semmoev1.ComponentEngine, nil},
		"user-managed policies": {func(m *semmoev1.MoEDeployment) { m.Spec.Routing.NetworkPolicy = semmoev1.NetworkPolicyNone }, semmoev1.ComponentRouter, nil},
		"stored by an upgrade":  {func(m *semmoev1.MoEDeployment) { m.Spec.Routing.NetworkPolicy = "" }, semmoev1.ComponentRouter, []string{"m", "m-router"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := networkPolicies(moedtest.Deployment(tc.change), tc.target, "semmoe-system", Engines{})
			for _, policy := range tc.want {
				if got[policy] == nil {
					t.Errorf("no policy %s", policy)
				}
			}
			if len(got) != len(tc.want) {
				t.Errorf("%d policies, want %v", len(got), tc.want)
			}
		})
	}
}
