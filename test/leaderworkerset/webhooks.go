// SPDX-License-Identifier: Apache-2.0

package main

import (
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"
)

const (
	setPath    = "leaderworkerset-x-k8s-io-v1-leaderworkerset"
	setName    = "leaderworkerset.kb.io"
	webhooksOf = "semmoe-test-leaderworkerset"
)

// sets are the requests about LeaderWorkerSets, pods those about pods that belong to one: others do not wait for this program.
var (
	sets = []admissionv1.RuleWithOperations{{
		Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update},
		Rule:       admissionv1.Rule{APIGroups: []string{leaderworkersetv1.GroupVersion.Group}, APIVersions: []string{"v1"}, Resources: []string{"leaderworkersets"}},
	}}
	pods = []admissionv1.RuleWithOperations{{
		Operations: []admissionv1.OperationType{admissionv1.Create},
		Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
	}}
	ofSets = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
		Key: leaderworkersetv1.SetNameLabelKey, Operator: metav1.LabelSelectorOpExists,
	}}}
)

func mutating() *admissionv1.MutatingWebhookConfiguration {
	hook := func(name, path string, rules []admissionv1.RuleWithOperations, selector *metav1.LabelSelector) admissionv1.MutatingWebhook {
		return admissionv1.MutatingWebhook{
			Name: name, ClientConfig: serviceAt("/mutate-" + path), Rules: rules, ObjectSelector: selector,
			SideEffects: ptr.To(admissionv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		}
	}
	return &admissionv1.MutatingWebhookConfiguration{
		TypeMeta:   metav1.TypeMeta{APIVersion: "admissionregistration.k8s.io/v1", Kind: "MutatingWebhookConfiguration"},
		ObjectMeta: metav1.ObjectMeta{Name: webhooksOf},
		Webhooks:   []admissionv1.MutatingWebhook{hook("m"+setName, setPath, sets, nil), hook("mpod.kb.io", "-v1-pod", pods, ofSets)},
	}
}

func validating() *admissionv1.ValidatingWebhookConfiguration {
	return &admissionv1.ValidatingWebhookConfiguration{
		TypeMeta:   metav1.TypeMeta{APIVersion: "admissionregistration.k8s.io/v1", Kind: "ValidatingWebhookConfiguration"},
		ObjectMeta: metav1.ObjectMeta{Name: webhooksOf},
		Webhooks: []admissionv1.ValidatingWebhook{{
			Name: "v" + setName, ClientConfig: serviceAt("/validate-" + setPath), Rules: sets,
			SideEffects: ptr.To(admissionv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		}},
	}
}

// serviceAt names a path; the address is put in its place once it is known.
func serviceAt(path string) admissionv1.WebhookClientConfig {
	return admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: "unused", Name: "unused", Path: &path}}
}
