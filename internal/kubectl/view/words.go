// SPDX-License-Identifier: Apache-2.0

package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// percent formats a rate in thousandths.
func percent(milli int32) string { return fmt.Sprintf("%.1f%%", float64(milli)/10) }

// ago formats the duration since a time like the ages of kubectl.
func ago(since, now time.Time) string { return duration.HumanDuration(now.Sub(since)) }

// bytesText formats a number of bytes in the largest unit in which it is at least 1.
func bytesText(bytes int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	value, unit := float64(bytes), 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", bytes)
	}
	return fmt.Sprintf("%.1f %s", value, units[unit])
}

// plural formats a number with its noun. It only supports nouns with a plural in s.
func plural[N int | int32 | int64](n N, noun string) string {
	if n == 1 {
		return fmt.Sprintf("1 %s", noun)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// condition returns the condition of a type. Its status is Unknown if the object has no such condition.
func condition(conditions []metav1.Condition, kind string) metav1.Condition {
	if found := meta.FindStatusCondition(conditions, kind); found != nil {
		return *found
	}
	return metav1.Condition{Type: kind, Status: metav1.ConditionUnknown, Reason: "NotReported", Message: "The operator has not reconciled it yet"}
}

// errorConditions report an error if they are True. progressConditions report work in progress if they are True.
var (
	errorConditions    = []string{semmoev1.ConditionDegraded, semmoev1.ConditionStalled}
	progressConditions = []string{semmoev1.ConditionProgressing, semmoev1.ConditionReconciling}
)

// toneOf returns the tone of a condition's status.
func toneOf(c metav1.Condition) terminal.Tone {
	isTrue := c.Status == metav1.ConditionTrue
	switch {
	case c.Status == metav1.ConditionUnknown:
		return terminal.Faint
	case slices.Contains(errorConditions, c.Type) && isTrue:
		return terminal.Bad
	case slices.Contains(progressConditions, c.Type) && isTrue:
		return terminal.Busy
	case slices.Contains(errorConditions, c.Type), slices.Contains(progressConditions, c.Type):
		return terminal.Plain
	case isTrue:
		return terminal.Good
	case c.Type == semmoev1.ConditionReady:
		return terminal.Bad
	}
	return terminal.Busy
}

// bar draws a share between 0 and 1 as ten blocks.
func bar(share float64) string {
	full := int(10*min(max(share, 0), 1) + 0.5)
	return strings.Repeat("█", full) + strings.Repeat("░", 10-full)
}

// list joins the non-empty parts with commas.
func list(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ", ")
}

// newestFirst sorts objects by creation time, newest first, then by name.
func newestFirst[T any, P interface {
	*T
	metav1.Object
}](objects []T) {
	slices.SortStableFunc(objects, func(a, b T) int {
		x, y := P(&a), P(&b)
		return cmp.Or(y.GetCreationTimestamp().Compare(x.GetCreationTimestamp().Time), strings.Compare(x.GetName(), y.GetName()))
	})
}
