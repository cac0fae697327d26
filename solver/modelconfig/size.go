package modelconfig

import (
	"bytes"
	"encoding/json"
	"reflect"
)

// Size is a number of a configuration, or the first of a list: Hunyuan has one for each layer, ERNIE's vision models the text's before
// that of images.
type Size int

// UnmarshalJSON refuses what is neither, and the empty list.
func (s *Size) UnmarshalJSON(text []byte) error {
	if !bytes.HasPrefix(text, []byte("[")) {
		return json.Unmarshal(text, (*int)(s))
	}
	var list []int
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	if len(list) == 0 {
		return &json.UnmarshalTypeError{Value: "empty list", Type: reflect.TypeFor[Size]()} // encoding/json adds the field
	}
	*s = Size(list[0])
	return nil
}
