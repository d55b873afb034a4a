# Flags common to all targets. No -ffast-math anywhere: NaN checks would vanish. -ffp-contract=off: a fused
# multiply-add appears only where a kernel asks for one, so that results do not depend on the compiler.
add_compile_options(-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -ffp-contract=off -fno-math-errno)
if(ASSAY_WERROR)
  add_compile_options(-Werror)
endif()
if(ASSAY_SANITIZE)
  add_compile_options(-fsanitize=${ASSAY_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ASSAY_SANITIZE})
endif()
