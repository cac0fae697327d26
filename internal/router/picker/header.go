// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"net/http"
	"slices"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// headerOf converts a header map. pseudo contains the pseudo-header fields, such as :path.
func headerOf(headers *corev3.HeaderMap) (header http.Header, pseudo map[string]string) {
	header, pseudo = http.Header{}, map[string]string{}
	for _, field := range headers.GetHeaders() {
		value := string(field.GetRawValue())
		if len(field.GetRawValue()) == 0 {
			value = field.GetValue()
		}
		if strings.HasPrefix(field.GetKey(), ":") {
			pseudo[field.GetKey()] = value
		} else {
			header.Add(field.GetKey(), value)
		}
	}
	return header, pseudo
}

// setHeader replaces all values of a field, or adds it.
func setHeader(name, value string) *corev3.HeaderValueOption {
	return headerOption(name, value, corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD)
}

func headerOption(name, value string, action corev3.HeaderValueOption_HeaderAppendAction) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: strings.ToLower(name), RawValue: []byte(value)},
		AppendAction: action,
	}
}

// difference returns the mutation from one header to another; nil if they are equal.
func difference(before, after http.Header) *extprocv3.HeaderMutation {
	mutation := &extprocv3.HeaderMutation{}
	for _, name := range sortedNames(before) {
		if _, kept := after[name]; !kept {
			mutation.RemoveHeaders = append(mutation.RemoveHeaders, strings.ToLower(name))
		}
	}
	for _, name := range sortedNames(after) {
		if slices.Equal(before[name], after[name]) {
			continue
		}
		action := corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
		for _, value := range after[name] {
			mutation.SetHeaders = append(mutation.SetHeaders, headerOption(name, value, action))
			action = corev3.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD
		}
	}
	if len(mutation.SetHeaders)+len(mutation.RemoveHeaders) == 0 {
		return nil
	}
	return mutation
}

func sortedNames(header http.Header) []string {
	names := make([]string, 0, len(header))
	for name := range header {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
