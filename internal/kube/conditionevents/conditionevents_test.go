// SPDX-License-Identifier: Apache-2.0

package conditionevents

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"github.com/semmoe/operator/internal/kube/printable"
)

// A reason is recorded once, or twice if also as a warning.
func TestTransitionEvents(t *testing.T) {
	recorder := events.NewFakeRecorder(10)
	teller := NewEventRecorder(recorder, nil, nil)
	condition := func(kind string, status metav1.ConditionStatus, reason string) *metav1.Condition {
		return &metav1.Condition{Type: kind, Status: status, Reason: reason, Message: "for " + kind}
	}
	teller.Record(condition("Progressing", metav1.ConditionTrue, "Solving"), false)
	teller.Record(condition("Ready", metav1.ConditionFalse, "Solving"), false)
	teller.Record(condition("Degraded", metav1.ConditionTrue, "Solving"), true)
	teller.Record(condition("Planned", metav1.ConditionTrue, "Planned"), false)
	close(recorder.Events)
	var notes []string
	for note := range recorder.Events {
		notes = append(notes, note)
	}
	want := []string{
		"Normal Solving Progressing is True: for Progressing", "Warning Solving Degraded is True: for Degraded", "Normal Planned Planned is True: for Planned",
	}
	if diff := cmp.Diff(want, notes); diff != "" {
		t.Error(diff)
	}
}

// TestTextOfOthers checks that an event contains no control character and no line break of an engine or a foreign server.
func TestTextOfOthers(t *testing.T) {
	recorder := events.NewFakeRecorder(1)
	message := "the engine: \x1b[31mno\x1b[2J\nmemory\u202e" + strings.Repeat("long", 500)
	NewEventRecorder(recorder, nil, nil).Record(&metav1.Condition{Type: "Planned", Status: metav1.ConditionTrue, Reason: "Planned", Message: message}, false)
	note := <-recorder.Events
	if printable.Line(note, len(note)) != note || !strings.Contains(note, "the engine: no\ufffd[2J memory") || len(note) > 1024 {
		t.Errorf("%d bytes: %q", len(note), note)
	}
}

// Steps are recorded when they begin. The initial False of Ready is not recorded; the loss of Ready is a warning.
func TestProgressEvents(t *testing.T) {
	conditions := func(statuses ...string) (list []metav1.Condition) {
		for _, text := range statuses {
			part := strings.Split(text, " ")
			list = append(list, metav1.Condition{Type: part[0], Status: metav1.ConditionStatus(part[1]), Reason: part[2], Message: "it"})
		}
		return list
	}
	begun := conditions("Progressing True Solving", "Degraded False AsExpected", "Ready False Solving")
	made := conditions("Progressing False Made", "Degraded False AsExpected", "Ready True Made")
	lost := conditions("Progressing False Made", "Degraded True Gone", "Ready False Missing")
	for name, test := range map[string]struct {
		before, after []metav1.Condition
		want          []string
	}{
		"begun": {nil, begun, []string{"Normal Solving Progressing is True: it"}},
		"same":  {begun, begun, nil},
		"made":  {begun, made, []string{"Normal Made Progressing is False: it"}},
		"lost":  {made, lost, []string{"Warning Gone Degraded is True: it", "Warning Missing Ready is False: it"}},
		"back":  {lost, made, []string{"Normal AsExpected Degraded is False: it", "Normal Made Ready is True: it"}},
	} {
		recorder := events.NewFakeRecorder(10)
		NewEventRecorder(recorder, nil, nil).RecordSteps(test.before, test.after)
		close(recorder.Events)
		var notes []string
		for note := range recorder.Events {
			notes = append(notes, note)
		}
		if diff := cmp.Diff(test.want, notes); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
